"""Plans of blocks in several layouts -> the cheapest plan of the whole model.

This solves a program like that of a block, but coarser: a kernel is a segment's plan for one interface, or
a change of layout between segments. The same solver and the same checks apply: every layout that a segment
reads is written by another segment or by a change of layout. Solved with the plans' costs, the program gives
the model's plan. Solved with their bounds, it gives a lower bound for all plans in which no kernel crosses a
cut and the values between segments are in one of the considered layouts.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from korch.binary_program.problem import Certificate, Computation, Port, PricedKernel, Problem
from korch.binary_program.solve import Solver
from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.errors import InfeasibleError
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.search.instance import PLAIN, Answers, Interface, layout_changes
from korch.search.ledger import Ledger
from korch.search.price import estimate_ns
from korch.segments.block import Partition
from korch.segments.block_search import BlockInterface
from korch.segments.block_task import BlockTask
from korch.segments.join import Joined
from korch.segments.trace import Key

CHANGE_ROUNDS = 8  # how often the layout changes in a choice are measured
PREFER_SECONDS = 2.0  # time of the choice of interfaces by estimates
PREFER_GAP = 0.005  # gap at which that solve ends


@dataclass(frozen=True)
class SegmentChoice:
    """A plan of the whole model as a choice of interfaces."""

    interfaces: tuple[int, ...]  # per segment, the number of the chosen interface of its block; -1 if it need not run
    # per segment, the changes of layout that run before it; one more entry has the changes after the last segment, for
    # the model's outputs
    changes: tuple[tuple[Candidate, ...], ...]
    objective_ns: int  # the cost of the whole plan
    bound_ns: int  # lower bound of the cost of all choices


@dataclass(frozen=True)
class _Option:
    """A segment in one of its block's interfaces."""

    segment: int
    interface: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


class Assembly:
    """The program of one model: it chooses an interface per segment, and the changes of layout between them."""

    def __init__(
        self, partition: Partition, joined: Joined, tasks: Sequence[BlockTask], ledger: Ledger, options: Options
    ) -> None:
        self.partition, self.joined, self.tasks = partition, joined, tasks
        self.ledger, self.options = ledger, options
        self.block_of = {i: b for b, block in enumerate(partition.blocks) for i in block.instances}
        self.graph = joined.graph
        self.plain = _plain_ports(joined.graph)
        outputs = dict.fromkeys(v for _, v in self.graph.outputs if v not in self.graph.given)
        self.required = tuple(self.plain[v] for v in outputs)

    def uses(self, choice: SegmentChoice, blocks: Sequence[Sequence[BlockInterface]]) -> Counter[BlockInterface]:
        """Return how often a choice uses each block in each interface."""
        return Counter(blocks[self.block_of[i]][j] for i, j in enumerate(choice.interfaces) if j >= 0)

    def block_counts(self) -> Counter[int]:
        """Return how often a plan runs each block."""
        graphs = [instance.graph for instance in self.partition.instances]
        computed = (i for i, graph in enumerate(graphs) if any(v not in graph.given for _, v in graph.outputs))
        return Counter(self.block_of[i] for i in computed)

    def prefer(self, estimated_ns: Mapping[Key, int]) -> SegmentChoice:
        """Return the choice with the least estimated cost; nothing is measured.

        `estimated_ns`: the estimated cost of plans, by block and interface.
        """
        choices = self._options(estimated_ns)
        changes = self._changes(choices)

        def cost_ns(option: _Option) -> int:
            return estimated_ns[self.block_of[option.segment], option.interface]

        costs = [cost_ns(option) for option in choices] + [estimate_ns(self.ledger, c) for c in changes]
        solver = self._solver(choices, changes, cost_ns)
        plan = self.ledger.solve(solver, costs, seconds=PREFER_SECONDS, gap=PREFER_GAP)
        objective_ns = sum(costs[k] for k in plan.kernels)
        return self._in_order(choices, changes, plan.kernels, objective_ns, 0)

    def choose(self, found: Mapping[Key, Certificate]) -> SegmentChoice:
        """Return the cheapest choice among the interfaces for which a plan was found.

        `found`: the certificates of the plans, by block and interface.
        """
        choices = self._options(found)
        changes = self._changes(choices)
        count, seconds = len(choices), self.options.search.solver_seconds

        def cost_ns(option: _Option) -> int:
            return found[self.block_of[option.segment], option.interface].objective_ns or 0

        def bound_ns(option: _Option) -> int:
            return found[self.block_of[option.segment], option.interface].bound_ns

        solver = self._solver(choices, changes, cost_ns)
        kernels: tuple[int, ...] = ()
        for _ in range(CHANGE_ROUNDS):
            costs, flags = self._costs(choices, changes, cost_ns)
            gone = [count + i for i, c in enumerate(changes) if self.ledger.has_failed(c)]
            kernels = self.ledger.solve(solver, costs, is_measured=flags, seconds=seconds, excluded=gone).kernels
            if self.required and not kernels:
                raise InfeasibleError(
                    f"the solver found no layouts for the values between {count} segments",
                    hint="Raise SearchLimits.solver_seconds, or search the model as a whole (SearchLimits.partition)",
                )
            unknown = [changes[k - count] for k in kernels if k >= count and not self.ledger.known(changes[k - count])]
            if not unknown:
                break
            self.ledger.measure(unknown)
        objective_ns = sum(self._costs(choices, changes, cost_ns)[0][k] for k in kernels)
        bounds_ns = self._costs(choices, changes, bound_ns)[0]
        least = self.ledger.solve(solver, bounds_ns, seconds=seconds).certificate.bound_ns
        return self._in_order(choices, changes, kernels, objective_ns, min(least, objective_ns))

    def least_ns(self, bounds_ns: Mapping[Key, int]) -> int:
        """Return a lower bound of the cost of any choice, for lower bounds by block and interface."""
        choices = self._options(bounds_ns)
        changes = self._changes(choices)

        def cost_ns(option: _Option) -> int:
            return bounds_ns[self.block_of[option.segment], option.interface]

        solver, costs = self._solver(choices, changes, cost_ns), self._costs(choices, changes, cost_ns)[0]
        return self.ledger.solve(solver, costs, seconds=PREFER_SECONDS).certificate.bound_ns

    def _solver(
        self, choices: Sequence[_Option], changes: Sequence[Candidate], cost_ns: Callable[[_Option], int]
    ) -> Solver:
        return Solver(self._problem(choices, changes, cost_ns), limits=self.ledger.limits)

    def steps(self, choice: SegmentChoice, plans: Callable[[int, int], Sequence[Candidate]]) -> tuple[Candidate, ...]:
        """Return a choice's kernels in order.

        If two segments change the layout of a value that both read, the change runs only once.

        `plans`: returns a block's plan for an interface, given the numbers of both.
        """
        steps: list[Candidate] = []
        for i, j in enumerate(choice.interfaces):
            steps += choice.changes[i]
            if j >= 0:
                steps += (self.joined.place(i, c) for c in plans(self.block_of[i], j))
        steps += choice.changes[-1]
        written: set[tuple[int, Layout]] = set()
        kept = []
        for step in steps:
            if not written.issuperset(step.output_ports):
                written.update(step.output_ports)
                kept.append(step)
        return tuple(kept)

    def _options(self, found: Container[Key]) -> list[_Option]:
        options = []
        for i, instance in enumerate(self.partition.instances):
            values, graph = self.joined.values[i], instance.graph
            b = self.block_of[i]
            outputs = dict.fromkeys(v for _, v in graph.outputs if v not in graph.given)
            if not outputs:
                continue
            for j, interface in enumerate(self.tasks[b].interfaces):
                if (b, j) in found:
                    options.append(
                        _Option(
                            i,
                            j,
                            _ports(graph, values, [v for _, v in graph.inputs], interface),
                            _ports(graph, values, list(outputs), interface),
                        )
                    )
        return options

    def _changes(self, options: Sequence[_Option]) -> list[Candidate]:
        """Return the changes from layouts in which values may be written to layouts in which they may be read."""
        outputs = [port for option in options for port in option.outputs]
        inputs = [port for option in options for port in option.inputs]
        written = _layouts((*outputs, *(self.plain[v] for _, v in self.graph.inputs)))
        read = _layouts((*inputs, *(self.plain[v] for _, v in self.graph.outputs)))
        meter = self.ledger.meter
        found = layout_changes(self.graph, Answers(meter.providers, meter.target, meter.faults), written, read)
        self.ledger.look_up(found)
        return found

    def _problem(
        self, options: Sequence[_Option], changes: Sequence[Candidate], cost_ns: Callable[[_Option], int]
    ) -> Problem:
        steps: list[Computation] = []
        of_segment: dict[int, frozenset[int]] = {}
        kernels = []
        for option in options:
            if option.segment not in of_segment:
                first = len(steps)
                reads = tuple(port.value for port in option.inputs)
                steps += (Computation(port.value, reads) for port in option.outputs)
                of_segment[option.segment] = frozenset(range(first, len(steps)))
            kernels.append(
                PricedKernel(of_segment[option.segment], self._needed(option.inputs), option.outputs, cost_ns(option))
            )
        for change in changes:
            ports = [Port(v, str(layout)) for v, layout in change.input_ports]
            after = [Port(v, str(layout)) for v, layout in change.output_ports]
            kernels.append(PricedKernel(frozenset(), tuple(ports), tuple(after), 0))
        return Problem(
            steps=tuple(steps),
            kernels=tuple(kernels),
            required=self.required,
            given=frozenset(self.plain[v] for _, v in self.graph.inputs),
            constants=frozenset(self.graph.constants),
        )

    def _needed(self, ports: Sequence[Port]) -> tuple[Port, ...]:
        return tuple(port for port in ports if port.value not in self.graph.constants)

    def _costs(
        self, options: Sequence[_Option], changes: Sequence[Candidate], cost_ns: Callable[[_Option], int]
    ) -> tuple[list[int], list[bool]]:
        changed = [self.ledger.cost_ns(change) for change in changes]
        costs = [cost_ns(option) for option in options] + [cost for cost, _ in changed]
        return costs, [True] * len(options) + [flag for _, flag in changed]

    def _in_order(
        self,
        options: Sequence[_Option],
        changes: Sequence[Candidate],
        kernels: Sequence[int],
        objective_ns: int,
        bound_ns: int,
    ) -> SegmentChoice:
        """Return the chosen kernels by segment, each change of layout before its first reader."""
        makers = {
            Port(value, str(layout)): changes[k - len(options)]
            for k in kernels
            if k >= len(options)
            for value, layout in changes[k - len(options)].output_ports
        }
        chosen = {options[k].segment: options[k] for k in kernels if k < len(options)}
        count = len(self.partition.instances)
        interfaces = [chosen[i].interface if i in chosen else -1 for i in range(count)]
        changed: list[tuple[Candidate, ...]] = []
        for i in range(count + 1):
            reads = [self.plain[v] for _, v in self.graph.outputs]
            if i < count:
                reads = list(chosen[i].inputs) if i in chosen else []
            changed.append(tuple(_made_now(reads, makers)))
        return SegmentChoice(tuple(interfaces), tuple(changed), objective_ns, bound_ns)


def _made_now(ports: Sequence[Port], makers: dict[Port, Candidate]) -> list[Candidate]:
    """Return the changes of layout that must run before some ports are read, and remove them from `makers`."""
    found: list[Candidate] = []
    for port in ports:
        if port in makers:
            change = makers.pop(port)
            before = [Port(value, str(layout)) for value, layout in change.input_ports]
            found += (*_made_now(before, makers), change)
    return found


def _layouts(ports: Iterable[Port]) -> dict[int, set[Layout]]:
    """Return for each value the layouts that it has in some ports."""
    found: dict[int, set[Layout]] = {}
    for port in ports:
        found.setdefault(port.value, set()).add(Layout.parse(port.layout))
    return found


def _plain_ports(graph: PrimitiveGraph) -> dict[int, Port]:
    ends = {value for _, value in (*graph.inputs, *graph.outputs)}
    return {v: Port(v, str(Layout.plain(graph.types[v].rank))) for v in ends}


def _ports(
    graph: PrimitiveGraph, values: Sequence[int], own: Sequence[int], interface: Interface = PLAIN
) -> tuple[Port, ...]:
    """Return the ports of the whole graph for values of a segment."""
    found = (Port(values[v], interface.port(graph, v).layout) for v in own)
    return tuple(dict.fromkeys(found))
