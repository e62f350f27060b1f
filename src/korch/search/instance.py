"""Graph and candidates -> the instance that the solver is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from korch.binary_program.problem import Computation, Port, PricedKernel, Problem
from korch.binary_program.verify import check_problem, verify_kernels
from korch.candidate.candidate import Candidate, Group, Offer, Refusal, make_layout_change
from korch.candidate.layout import Layout
from korch.candidate.shape import Compose, GroupShape, shapes_of
from korch.cuda.target import CudaTarget
from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.provider.faults import Faults
from korch.provider.provider import AnyProvider
from korch.target import Target


@dataclass(frozen=True)
class Interface:
    """The layouts in which a graph receives its inputs and must write its outputs."""

    # layouts by value; a value that is missing has the plain layout
    layouts: Mapping[int, Layout] = field(default_factory=dict)

    def port(self, graph: PrimitiveGraph, value: int) -> Port:
        """Return the port of an input or an output: the value in its layout."""
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
    """The error that the less precise primitives of a graph add to the model's results, and its limit."""

    # the error of each primitive, in units of a budget; primitives that are missing add none
    of: Mapping[int, int] = field(default_factory=dict)
    most: int = 0  # the largest sum of the errors of a plan

    def __str__(self) -> str:
        return f" errors {self.most} {sorted(self.of.items())}" if self.of else ""


EXACT = Errors()
"""No primitive computes in a less precise type than the model's."""


@dataclass(frozen=True)
class Instance:
    """The input of a search: the candidates of a graph, for one interface."""

    graph: PrimitiveGraph  # the graph with its alternatives
    candidates: Sequence[Candidate]  # the candidates of the graph
    interface: Interface = PLAIN  # the layouts of the graph's inputs and outputs
    errors: Errors = EXACT  # the errors of less precise primitives, and their budget

    def of(self, candidates: Sequence[Candidate]) -> Instance:
        """Return the instance with other candidates of the same graph."""
        return replace(self, candidates=candidates)

    def problem(self, cost_ns: Callable[[Candidate], tuple[int, bool]]) -> Problem:
        """Return the program; `cost_ns` gives a candidate's cost and whether it is measured."""
        kernels = []
        for candidate in self.candidates:
            cost, is_measured = cost_ns(candidate)
            kernels.append(
                PricedKernel(
                    steps=frozenset(candidate.group.primitives),
                    inputs=_ports(candidate.input_ports),
                    outputs=_ports(candidate.output_ports),
                    cost_ns=cost,
                    is_measured=is_measured,
                    owns=_owned(self.graph, candidate),
                    error=sum(self.errors.of.get(p, 0) for p in candidate.group.primitives),
                )
            )
        required, given = self.interface.ports(self.graph)
        return Problem(
            steps=tuple(Computation(p.output, p.inputs) for p in self.graph.primitives),
            kernels=tuple(kernels),
            required=required,
            given=given,
            constants=frozenset(self.graph.constants),
            most_error=self.errors.most,
        )


@dataclass
class Answers:
    """What providers offer for groups on one machine. Equal groups are asked for only once, also across graphs."""

    providers: Sequence[AnyProvider]  # the providers to ask
    target: Target | CudaTarget  # the machine
    faults: Faults = field(default_factory=Faults)  # the errors that they raise
    # their offers or refusals so far, by the provider's name and the group's key
    known: dict[tuple[str, str], Sequence[Offer] | Refusal] = field(default_factory=dict)

    def ask(self, group: Group) -> None:
        """Ask all providers for a group, so that `known` has their answers."""
        for _ in self.to(group):
            pass

    def shapes(self) -> tuple[GroupShape | Compose, ...]:
        """Return the kinds of groups that the providers ask for."""
        asked = ((provider.name, shape) for provider in self.providers for shape in shapes_of([provider]))
        found = (shape if isinstance(shape, GroupShape) else self.faults.composed(name, shape) for name, shape in asked)
        return tuple(dict.fromkeys(found))

    def to(self, group: Group) -> Iterator[tuple[AnyProvider, Sequence[Offer] | Refusal]]:
        """Yield each provider with its answer for a group."""
        for provider in self.providers:
            key = (provider.name, group.key)
            if key not in self.known:
                self.known[key] = self.faults.offers(provider, group, self.target)
            yield provider, self.known[key]


def collect_candidates(
    graph: PrimitiveGraph,
    groups: Iterable[Group],
    answers: Answers,
    interfaces: Sequence[Interface] = (PLAIN,),
    held: Collection[int] | None = None,
) -> tuple[tuple[Candidate, ...], dict[str, int]]:
    """Ask every provider for every group; return the candidates, and the refusals with their counts.

    If a value is read or written in different layouts, the kernels that change its layout are candidates too.

    `interfaces`: the interfaces that will be used; changes between their layouts and those of the candidates are
    included. `held`: values whose memory an in-place kernel must not make a part of another value: the graph's inputs
    and outputs if not given. A model's inputs exist before the run, and its outputs have memory of their own, so making
    them parts of another value would need a copy.

    Returns:
        The candidates in a deterministic order; refusals as "provider: reason" with their counts.
    """
    if held is None:
        held = {value for _, value in (*graph.inputs, *graph.outputs)}
    refusals: Counter[str] = Counter()
    candidates = [candidate for group in groups for candidate in _candidates(group, answers, held, refusals)]
    written, read = _layouts(graph, candidates, interfaces)
    return (*candidates, *layout_changes(graph, answers, written, read)), dict(refusals)


def layout_changes(
    graph: PrimitiveGraph,
    answers: Answers,
    written: Mapping[int, Collection[Layout]],
    read: Mapping[int, Collection[Layout]],
) -> list[Candidate]:
    """Return the changes from the layouts in which values are written to others in which they are read.

    `written`: by value, the layouts in which it may be written. `read`: by value, the layouts in which it may be read.
    """
    several = (v for v in sorted(written.keys() & read.keys()) if len({*written[v], *read[v]}) > 1)
    groups = [make_layout_change(graph, value) for value in several if value not in graph.constants]
    return [
        candidate
        for group in groups
        for candidate in _candidates(group, answers, (), Counter())
        if candidate.offer.inputs[0] in written[group.inputs[0]]
        and candidate.offer.outputs[0] in read[group.inputs[0]]
        and candidate.offer.inputs != candidate.offer.outputs
    ]


def _candidates(group: Group, answers: Answers, held: Collection[int], refusals: Counter[str]) -> Iterator[Candidate]:
    """Yield the candidates that providers offer for a group, and count refusals."""
    for provider, answer in answers.to(group):
        if isinstance(answer, Refusal):
            refusals[f"{provider.name}: {answer.reason}"] += 1
            continue
        for offer in answer:
            if not offer.is_in_place or not any(value in held for value in group.inputs):
                yield Candidate(group, provider.name, offer, provider.version)


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


def check_steps(graph: PrimitiveGraph, steps: Sequence[Candidate]) -> None:
    """Check that kernels in the given order are a plan for a graph.

    Raises:
        InvalidGraphError: they are not a plan.
    """
    problem = Instance(graph, steps).problem(lambda _: (0, False))
    check_problem(problem)
    order = tuple(range(len(steps)))
    if verify_kernels(problem, order) != order:
        raise InvalidGraphError("a kernel runs before what it reads is written")


def _owned(graph: PrimitiveGraph, candidate: Candidate) -> tuple[Port, ...]:
    """Return the ports whose memory becomes a part of the output's memory.

    Layouts with the same byte order count as the same layout, as in memory planning.
    """
    if not candidate.offer.is_in_place:
        return ()
    return tuple(
        Port(value, str(layout.normalized(graph.types[value].shape))) for value, layout in candidate.input_ports
    )


def _ports(ports: Iterable[tuple[int, Layout]]) -> tuple[Port, ...]:
    return tuple(Port(value, str(layout)) for value, layout in ports)
