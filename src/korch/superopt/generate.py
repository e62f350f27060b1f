"""Expressions of a result -> block graphs: what a task computes, and in which order.

A *block graph* has a loop along at most one reduced axis, steps before, in and after it, and accumulators that
the loop carries. The search is depth first, one step after another; each set of steps is visited once.
The steps of a loop may read the running value of a maximum that the loop accumulates: sums that depend on it are
rescaled by e^(old - new) when it changes.

A prefix is pruned if (a) its last expression can't lead to the result, or no step can follow it; (b) too many
of its values are unread; (c) one of its tiles is larger than a core's cache; (d) its arithmetic alone takes
longer than the best block graph so far (`Rules.margin`).

Source: Mirage (Wu et al., OSDI 2025), section 4.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

from korch.superopt.axes import Named, points
from korch.superopt.expressions import Expression, Expressions

STEPS = 14  # most steps of a block graph
# Block graphs with at most this many steps are searched first; they give a time bound for the search of longer ones.
FIRST_STEPS = 6
MARGIN = 1.5  # block graphs that may take up to this many times the time of the best one are found too

TRANSCENDENTAL = ("exp", "log", "sigmoid", "tanh", "erf", "sqrt")
"""Operations that take as long as several multiplications."""

TRANSCENDENTAL_POINTS, VECTOR_POINTS = 8, 2
"""The arithmetic of an operation on one element, in units of one multiply-add of a contraction."""


class LoopPhase(IntEnum):
    """When a task computes a value: before, in or after its loop."""

    BEFORE = 0
    TURN = 1
    AFTER = 2


@dataclass(frozen=True, slots=True, order=True)
class GraphOperand:
    """A value of a block graph: its class, and the phase from which it is available."""

    expression: int
    phase: LoopPhase


class StepKind(IntEnum):
    """The kind of a step."""

    APPLY = 0
    REDUCE = 1
    CONTRACT = 2


@dataclass(frozen=True, slots=True, order=True)
class BlockStep:
    """A step of a block graph."""

    kind: StepKind  # an elementwise operation, a reduction, or a contraction of two operands
    op: str  # the operation; "reduce_sum" for a contraction
    operands: tuple[GraphOperand, ...]  # the values that it reads; numbers are operands, too
    result: GraphOperand  # the value that it computes
    axis: str = ""  # the axis that it reduces
    # elementwise steps that are fused with it; the last one is the step itself if that is elementwise
    body: tuple[Expression, ...] = ()
    is_carried: bool = False  # whether the loop accumulates it over its iterations
    follows: int = -1  # the running maximum by whose changes a carried sum is rescaled; -1 if there is none


@dataclass(frozen=True)
class BlockGraph:
    """What each task computes."""

    loop: str  # the axis of the loop, "" if there is none
    steps: tuple[BlockStep, ...]  # in order
    work: int  # arithmetic, in multiply-adds


class OtherSteps(Protocol):
    """Further steps of a search, which counts what its pruning saves."""

    ways: Expressions

    def following(self, there: Collection[int]) -> Iterator[Expression]:
        """Yield those over the available classes."""
        ...


@dataclass
class Rules:
    """Which prefixes are pruned, and the limits of the search."""

    most_steps: int = STEPS  # the most steps of a block graph
    # block graphs of up to this many steps are searched first; they give a bound for longer ones
    first_steps: int = FIRST_STEPS
    margin: float = MARGIN  # block graphs are kept up to this many times the arithmetic of the best one
    tile_elements: int = 1 << 18  # the elements of the largest tile
    # steps to visit beside those that can lead to the result: with them, no prefix is pruned because of its expressions
    others: Callable[[Expressions], OtherSteps] | None = None
    by_readers: bool = True  # whether to prune prefixes with too many unread values
    by_bound: bool = True  # whether to prune prefixes that take too long
    seconds: float = 10.0  # the longest time of the search
    most_found: int = 64  # the most block graphs to return


@dataclass
class GraphSearch:
    """How many prefixes were visited, how many each rule pruned, and the block graphs that were found."""

    visited: int = 0
    pruned: Counter[str] = field(default_factory=Counter)
    found: list[BlockGraph] = field(default_factory=list)
    seconds: float = 0.0
    is_complete: bool = True


@dataclass(frozen=True)
class _State:
    """A prefix: its steps, the available values with the running maxima they depend on, unread classes, and work."""

    steps: tuple[BlockStep, ...]
    there: Mapping[GraphOperand, frozenset[int]]
    unread: frozenset[int]
    work: int


def block_graphs(computation: Named, ways: Expressions, rules: Rules | None = None) -> GraphSearch:
    """Return the block graphs of a computation, those with the least arithmetic first."""
    rules = rules or Rules()
    search, begin = GraphSearch(), time.monotonic()
    reduced = sorted({step.axis for step in ways.steps if step.axis} - set(computation.result))
    end = begin + rules.seconds
    for steps in dict.fromkeys((min(rules.first_steps, rules.most_steps), rules.most_steps)):
        for loop in ("", *reduced):
            _Generator(computation, ways, replace(rules, most_steps=steps), search, loop, end).run()
    search.found = list(dict.fromkeys(search.found))
    search.found.sort(key=lambda graph: (graph.work, len(graph.steps)))
    del search.found[rules.most_found :]
    search.seconds = time.monotonic() - begin
    return search


class _Generator:
    """The search for block graphs with a given loop."""

    def __init__(
        self, computation: Named, ways: Expressions, rules: Rules, search: GraphSearch, loop: str, end: float
    ) -> None:
        self.computation, self.rules, self.search, self.loop, self.end = computation, rules, search, loop, end
        self.others = rules.others(ways) if rules.others is not None else None
        self.ways = self.others.ways if self.others is not None else ways
        self.sizes = computation.sizes
        self.seen: set[frozenset[BlockStep]] = set()
        # Cheap steps first, so that the bound is low early.
        self.candidates = sorted([*self._applications(), *self._collections()], key=self._least_work)
        self.best = min((graph.work for graph in search.found), default=None)

    def run(self) -> None:
        leaves = {GraphOperand(c, self._phase_of_input(c)) for c in set(self.ways.inputs.values())}
        there: dict[GraphOperand, frozenset[int]] = dict.fromkeys(leaves, frozenset())
        there |= {GraphOperand(c, LoopPhase.BEFORE): frozenset() for c in self.ways.numbers}
        self._visit(_State((), there, frozenset(c for c in self.ways.inputs.values()), 0))

    def _phase_of_input(self, expression: int) -> LoopPhase:
        return LoopPhase.TURN if self.loop in self.ways.axes[expression] else LoopPhase.BEFORE

    # What may be computed

    def _least_work(self, step: Expression) -> int:
        axes = {axis for a in step.arguments for axis in self.ways.axes[a]}
        return points(self.sizes, tuple(axes)) * (1 if step.op == "contract" else VECTOR_POINTS)

    def _applications(self) -> Iterator[Expression]:
        for step in self.ways.steps:
            if step.axis:
                continue
            axes = self.ways.axes
            if any(axes[a] == axes[step.result] for a in step.arguments):  # no outer products
                yield step
            else:
                self.search.pruned["outer product"] += 1

    def _collections(self) -> Iterator[Expression]:
        """Yield reductions, and contractions: sums of products, named "contract"."""
        made = dict[int, list[Expression]]()
        for step in self.ways.steps:
            if step.op == "mul" and len(step.body) == 1:
                made.setdefault(step.result, []).append(step)
        for step in self.ways.steps:
            if not step.axis:
                continue
            yield step
            for product in made.get(step.arguments[0], ()) if step.op == "reduce_sum" and not step.body else ():
                axes = [set(self.ways.axes[a]) for a in product.arguments]
                is_shared = all(step.axis in each for each in axes)
                if is_shared and axes[0] != axes[1]:
                    yield Expression("contract", product.arguments, step.result, step.axis)

    def _next(self, state: _State) -> Iterator[tuple[BlockStep, frozenset[int]]]:
        """Yield each step that may follow, with the running maxima that its result depends on."""
        others = self.others.following({x.expression for x in state.there}) if self.others is not None else ()
        for step in (*self.candidates, *others):
            for operands in self._choices(state, step.arguments):
                phases = {x.phase for x in operands}
                if {LoopPhase.TURN, LoopPhase.AFTER} <= phases:
                    continue
                follows = frozenset[int]().union(*(state.there[x] for x in operands))
                made = self._step(step, operands, max(phases), follows)
                if made is not None:
                    yield made

    def _choices(self, state: _State, arguments: tuple[int, ...]) -> Iterator[tuple[GraphOperand, ...]]:
        ways: list[tuple[GraphOperand, ...]] = [()]
        for argument in arguments:
            phases = [
                GraphOperand(argument, phase) for phase in LoopPhase if GraphOperand(argument, phase) in state.there
            ]
            ways = [(*way, operand) for way in ways for operand in phases]
        yield from ways

    def _step(
        self, step: Expression, operands: tuple[GraphOperand, ...], phase: LoopPhase, follows: frozenset[int]
    ) -> tuple[BlockStep, frozenset[int]] | None:
        if not step.axis:
            return BlockStep(
                StepKind.APPLY, step.op, operands, GraphOperand(step.result, phase), body=step.body
            ), follows
        kind = StepKind.CONTRACT if step.op == "contract" else StepKind.REDUCE
        op = "reduce_sum" if kind is StepKind.CONTRACT else step.op
        if step.axis != self.loop:
            return BlockStep(kind, op, operands, GraphOperand(step.result, phase), step.axis, step.body), follows
        if phase is not LoopPhase.TURN or len(follows) > 1 or (follows and op != "reduce_sum"):
            self.search.pruned["accumulator"] += 1
            return None
        result = GraphOperand(step.result, LoopPhase.AFTER)
        return BlockStep(kind, op, operands, result, step.axis, step.body, True, min(follows, default=-1)), frozenset()

    # Depth first

    def _visit(self, state: _State) -> None:
        if time.monotonic() > self.end:
            self.search.is_complete = False
            return
        self.search.visited += 1
        if self._is_done(state):
            return
        if len(state.steps) >= self.rules.most_steps:
            self.search.pruned["steps"] += 1
            return
        for step, follows in self._next(state):
            if step.result in state.there:
                continue
            last = state.steps[-1] if state.steps else None
            if last is not None and last.result.expression not in {x.expression for x in step.operands} and step < last:
                self.search.pruned["another order"] += 1
                continue
            key = frozenset((*state.steps, step))
            if key in self.seen:
                self.search.pruned["visited before"] += 1
                continue
            self.seen.add(key)
            following = self._with(state, step, follows)
            if reason := self._pruned(following, step):
                self.search.pruned[reason] += 1
                continue
            self._visit(following)

    def _with(self, state: _State, step: BlockStep, follows: frozenset[int]) -> _State:
        there = {**state.there, step.result: follows}
        if step.is_carried and step.op == "reduce_max":
            running = step.result.expression
            there[GraphOperand(running, LoopPhase.TURN)] = frozenset({running})
        unread = (state.unread - {x.expression for x in step.operands}) | {step.result.expression}
        return _State((*state.steps, step), there, unread, state.work + self.work(step))

    def _pruned(self, state: _State, step: BlockStep) -> str:
        left = self.rules.most_steps - len(state.steps)
        if self.rules.by_readers and len(state.unread) > left + 1:
            return "unread values"
        if points(self.sizes, self._whole(step)) > self.rules.tile_elements:
            return "memory"
        if self.rules.by_bound and self.best is not None and state.work > self.rules.margin * self.best:
            return "bound"
        return ""

    def _whole(self, step: BlockStep) -> tuple[str, ...]:
        """Return the axes that a tile holds whole: those that are neither axes of the result nor of the loop."""
        kept = {*self.computation.result, self.loop}
        return tuple(axis for axis in self.ways.axes[step.result.expression] if axis not in kept)

    def work(self, step: BlockStep) -> int:
        """Return the arithmetic of a step, if it is computed once."""
        axes = {axis for x in step.operands for axis in self.ways.axes[x.expression]}
        count = points(self.sizes, tuple(axes))
        if step.kind is StepKind.CONTRACT:
            return count
        ops = [x.op for x in step.body] + ([step.op] if step.axis else [])
        return count * sum(TRANSCENDENTAL_POINTS if op in TRANSCENDENTAL else VECTOR_POINTS for op in ops)

    def _is_done(self, state: _State) -> bool:
        """Return whether a prefix computes the result; keep it as a block graph if all its values are read."""
        phases = (LoopPhase.AFTER,) if self.loop else (LoopPhase.BEFORE,)
        if not any(GraphOperand(self.ways.goal, phase) in state.there for phase in phases):
            return False
        if state.unread != {self.ways.goal}:
            self.search.pruned["never read"] += 1
            return False
        self.search.found.append(BlockGraph(self.loop, state.steps, state.work))
        self.best = min(self.best or state.work, state.work)
        return True
