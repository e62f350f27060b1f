"""Graph and candidates -> the instance that the solver sees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from korch.candidate.candidate import Candidate, Group, Offer, Refusal, make_layout_change
from korch.candidate.enumerate import Key
from korch.candidate.layout import Layout
from korch.deadline import Deadline
from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.program.problem import Computation, Kernel, Port, Problem
from korch.program.verify import check_problem, verify_kernels
from korch.provider.provider import Provider, faults_named


@dataclass(frozen=True)
class Interface:
    """The layouts in which a graph is given its inputs and must write its outputs.

    Attributes:
        layouts: by value; a value that is not there is in the plain layout.
    """

    layouts: Mapping[int, Layout] = field(default_factory=dict)

    def port(self, graph: PrimitiveGraph, value: int) -> Port:
        """Return the port that an input or an output is."""
        return Port(value, str(self.layouts.get(value, Layout.plain(graph.types[value].rank))))

    def ports(self, graph: PrimitiveGraph) -> tuple[tuple[Port, ...], frozenset[Port]]:
        """Return the ports that must be written and those that are given."""
        inputs = {value for _, value in graph.inputs}
        outputs = dict.fromkeys(v for _, v in graph.outputs if v not in graph.given)
        return (
            tuple(self.port(graph, value) for value in outputs),
            frozenset(self.port(graph, value) for value in inputs),
        )

    def __str__(self) -> str:
        return " ".join(f"%{value}:{layout}" for value, layout in sorted(self.layouts.items()))


PLAIN = Interface()


@dataclass(frozen=True)
class Errors:
    """What less precise primitives of a graph add to the error of the model's results.

    Attributes:
        of: by primitive, in units of a budget; the others add nothing.
        most: what those of a plan may add up to.
    """

    of: Mapping[int, int] = field(default_factory=dict)
    most: int = 0

    def __str__(self) -> str:
        return f" errors {self.most} {sorted(self.of.items())}" if self.of else ""


EXACT = Errors()
"""All primitives are of the types that the model has."""

Answers = dict[tuple[str, str], Sequence[Offer] | Refusal]
"""What providers say of groups, by the provider's name and the group's key."""


def collect_candidates(
    graph: PrimitiveGraph,
    groups: Iterable[Group],
    providers: Sequence[Provider[Any, Any]],
    target: object,
    interfaces: Sequence[Interface] = (PLAIN,),
    held: Collection[int] | None = None,
    answers: Answers | None = None,
    deadline: Deadline | None = None,
    needed: Collection[Key] = (),
) -> tuple[tuple[Candidate, ...], dict[str, int]]:
    """Ask every provider for every group; return the candidates, and how many refused why.

    Equal groups are asked for once. For each value that two candidates hold in different layouts,
    changes of layout are candidates too.

    Args:
        graph: the graph.
        groups: its groups.
        providers: who may run them.
        target: the machine.
        interfaces: those that will be asked for; changes between them and what candidates
            hold are among the candidates.
        held: values whose memory no kernel of this graph may make a part of another's: those at
            the graph's ends if not given. A model's inputs are there before, and its outputs have
            memory of their own: to make them parts of another value costs a copy.
        answers: what the providers said of groups of other graphs; what they say now is added.
        deadline: when to leave out groups of several primitives; a plan needs none of them.
        needed: groups that are not left out.

    Returns:
        The candidates in a deterministic order; refusals as "provider: reason" with their counts.
    """
    if held is None:
        held = {value for _, value in (*graph.inputs, *graph.outputs)}
    asked = _Asked(providers, target, held, {} if answers is None else answers)
    for group in groups:
        is_needed = len(group.primitives) == 1 or (group.primitives, group.outputs) in needed
        if is_needed or deadline is None or not deadline.is_over:
            asked.ask(group)
    written, read = _layouts(graph, asked.candidates, interfaces)
    candidates = tuple(asked.candidates)
    return (*candidates, *asked.layout_changes(graph, written, read)), asked.refusals


def layout_changes(
    graph: PrimitiveGraph,
    providers: Sequence[Provider[Any, Any]],
    target: object,
    written: Mapping[int, Collection[Layout]],
    read: Mapping[int, Collection[Layout]],
) -> list[Candidate]:
    """Return the changes between the layouts in which values are written and others are read.

    Args:
        graph: the graph.
        providers: who may run them.
        target: the machine.
        written: by value, the layouts in which it may be written.
        read: by value, the layouts in which it may be read.
    """
    return _Asked(providers, target, (), {}).layout_changes(graph, written, read)


@dataclass
class _Asked:
    """The candidates that providers offer for some groups, and their refusals."""

    providers: Sequence[Provider[Any, Any]]
    target: object
    held: Collection[int]
    answers: Answers
    candidates: list[Candidate] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)

    def ask(self, group: Group) -> None:
        """Ask all providers for a group, unless the answer is known."""
        for provider in self.providers:
            key = (provider.name, group.key)
            if key not in self.answers:
                with faults_named(provider, group):
                    self.answers[key] = provider.offer(group, self.target)
            answer = self.answers[key]
            if isinstance(answer, Refusal):
                text = f"{provider.name}: {answer.reason}"
                self.refusals[text] = self.refusals.get(text, 0) + 1
                continue
            self.candidates.extend(
                Candidate(group, provider.name, offer, provider.version)
                for offer in answer
                if not offer.is_in_place or not any(value in self.held for value in group.inputs)
            )

    def layout_changes(
        self, graph: PrimitiveGraph, written: Mapping[int, Collection[Layout]], read: Mapping[int, Collection[Layout]]
    ) -> list[Candidate]:
        """Return the changes from a layout that is written to another one that is read."""
        count = len(self.candidates)
        for value in sorted(written.keys() & read.keys()):
            if len({*written[value], *read[value]}) > 1 and value not in graph.constants:
                self.ask(make_layout_change(graph, value))
        return [
            c
            for c in self.candidates[count:]
            if c.offer.inputs[0] in written[c.group.inputs[0]]
            and c.offer.outputs[0] in read[c.group.inputs[0]]
            and c.offer.inputs != c.offer.outputs
        ]


def _layouts(
    graph: PrimitiveGraph, candidates: Sequence[Candidate], interfaces: Sequence[Interface]
) -> tuple[dict[int, set[Layout]], dict[int, set[Layout]]]:
    """Return the layouts in which each value may be written, and those in which it may be read."""
    written: dict[int, set[Layout]] = {}
    read: dict[int, set[Layout]] = {}
    for candidate in candidates:
        for value, layout in candidate.output_ports:
            written.setdefault(value, set()).add(layout)
        for value, layout in candidate.input_ports:
            read.setdefault(value, set()).add(layout)
    for _, value in (*graph.inputs, *graph.outputs):
        plain = Layout.plain(graph.types[value].rank)
        layouts = {interface.layouts.get(value, plain) for interface in interfaces} | {plain}
        written.setdefault(value, set()).update(layouts)
        read.setdefault(value, set()).update(layouts)
    return written, read


def make_problem(
    graph: PrimitiveGraph,
    candidates: Sequence[Candidate],
    cost_ns: Callable[[Candidate], tuple[int, bool]],
    interface: Interface = PLAIN,
    errors: Errors = EXACT,
) -> Problem:
    """Return the instance; `cost_ns` gives a candidate's cost and whether it is measured."""
    kernels = []
    for candidate in candidates:
        cost, is_measured = cost_ns(candidate)
        kernels.append(
            Kernel(
                steps=frozenset(candidate.group.primitives),
                inputs=_ports(candidate.input_ports),
                outputs=_ports(candidate.output_ports),
                cost_ns=cost,
                is_measured=is_measured,
                owns=_owned(graph, candidate),
                error=sum(errors.of.get(p, 0) for p in candidate.group.primitives),
            )
        )
    required, given = interface.ports(graph)
    return Problem(
        steps=tuple(Computation(p.output, p.inputs) for p in graph.primitives),
        kernels=tuple(kernels),
        required=required,
        given=given,
        constants=frozenset(graph.constants),
        most_error=errors.most,
    )


def check_steps(graph: PrimitiveGraph, steps: Sequence[Candidate]) -> None:
    """Check that kernels in this order are a plan for a graph.

    Raises:
        InvalidGraphError: they are not.
    """
    problem = make_problem(graph, steps, lambda _: (0, False))
    check_problem(problem)
    order = tuple(range(len(steps)))
    if verify_kernels(problem, order) != order:
        raise InvalidGraphError("a kernel runs before what it reads is written")


def _owned(graph: PrimitiveGraph, candidate: Candidate) -> tuple[Port, ...]:
    """Return the ports whose memory becomes a part of the output's.

    Layouts with the same bytes are one, as they are where memory is planned.
    """
    if not candidate.offer.is_in_place:
        return ()
    return tuple(
        Port(value, str(layout.normalized(graph.types[value].shape))) for value, layout in candidate.input_ports
    )


def _ports(ports: Iterable[tuple[int, Layout]]) -> tuple[Port, ...]:
    return tuple(Port(value, str(layout)) for value, layout in ports)
