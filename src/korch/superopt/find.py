"""Group -> verified tile programs that compute it, found by search and stored.

Block graphs are generated, and the best graphs are emitted with their best cuts (tile sizes). Each graph is verified
at small sizes, with partial blocks, before a program is offered. Results are stored in the database under the group's
key, with the counts of what was pruned, so another model with the same group needs no search.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from korch.candidate.candidate import Group
from korch.errors import InvalidGraphError
from korch.records import plain, read_record
from korch.superopt.axes import Named, NotNamedError, named, resized
from korch.superopt.emit import NotEmittedError, emit, vectors_of_panels
from korch.superopt.expressions import Expressions, expressions
from korch.superopt.frame import BlockSizes
from korch.superopt.generate import BlockGraph, BlockStep, GraphSearch, Rules, StepKind, block_graphs
from korch.superopt.sizes import CacheMachine, SizedCut, columns_of, cuts, small_cut, small_sizes
from korch.superopt.verify import verify
from korch.system.deadline import Deadline
from korch.tile.check.check import check_program
from korch.tile.ir.program import TileProgram
from korch.tile.ir.stored import read_program, stored_program
from korch.tile.ir.text import format_program

GROUP_SECONDS = 12.0  # time of the search for one group

LATE = "no time is left for the superoptimizer"


@dataclass(frozen=True, slots=True)
class Effort:
    """What the search verifies and offers for a group."""

    cuts: int = 2  # the most cuts of each block graph that are emitted
    worth: float = 1.3  # programs with more than this many times the least estimate are not verified
    graphs: int = 8  # the most block graphs that are verified
    programs: int = 4  # the most programs that are offered


DEFAULT_EFFORT = Effort()


@dataclass(frozen=True)
class FoundProgram:
    """A verified program of a group."""

    stored: str  # the program as JSON
    # positions of constant inputs that are packed in panels, each with the columns of a panel
    packed: tuple[tuple[int, int], ...]
    turns: int  # the number of iterations of its loop; 1 if there is none
    steps: tuple[str, ...]  # its block graph, a line for each step
    estimate_ns: float  # its estimated time

    @property
    def program(self) -> TileProgram:
        """The program; it raises the error of `read_program`."""
        return read_program(self.stored)

    @cached_property
    def text(self) -> str:
        """The program as text."""
        return format_program(self.program)

    @cached_property
    def name(self) -> str:
        """A short hash of the program."""
        return hashlib.sha256(self.stored.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a search for a group."""

    programs: tuple[FoundProgram, ...] = ()  # the best first
    visited: int = 0  # the number of prefixes that were visited
    pruned: Mapping[str, int] = field(default_factory=dict)  # how many prefixes were pruned, by rule
    refused: Mapping[str, int] = field(default_factory=dict)  # how many block graphs were refused, by reason
    seconds: float = 0.0  # the duration of the search
    reason: str = ""  # why nothing was searched, or ""
    is_complete: bool = True  # whether no limit of time ended it


def finding_text(finding: Finding) -> str:
    """Return a finding as the text that is stored."""
    return json.dumps(plain(finding))


def read_finding(text: str) -> Finding | None:
    """Return the finding that a text represents; None if the text is damaged."""
    try:
        finding = read_record(Finding, json.loads(text), "finding")
        for found in finding.programs:
            check_program(found.program)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, InvalidGraphError):
        return None
    return finding


def timed_search(group: Group, machine: CacheMachine, deadline: Deadline, effort: Effort) -> tuple[Finding, bool]:
    """Search for a group until a deadline; return the finding, and whether more time would not change it."""
    left_s, most_s = deadline.left_s, GROUP_SECONDS
    seconds = most_s if left_s is None else min(most_s, left_s)
    if seconds <= 0:
        return Finding(reason=LATE), False
    finding = search(group, machine, seconds, effort)
    return finding, finding.is_complete or seconds == most_s


def search(
    group: Group, machine: CacheMachine, seconds: float = GROUP_SECONDS, effort: Effort = DEFAULT_EFFORT
) -> Finding:
    """Return verified programs of a group, after at most some seconds; none if it is no computation over named axes."""
    begin = time.monotonic()
    try:
        computation = named(group.body)
    except NotNamedError as error:
        return Finding(reason=str(error))
    ways = expressions(computation)
    rules = Rules(tile_elements=machine.cache_bytes // 4, seconds=seconds / 2)
    found = block_graphs(computation, ways, rules)
    return _Selection(group, machine, effort, computation, ways, found, begin, begin + seconds).run()


@dataclass
class _Selection:
    """The choice of block graphs and of their cuts (tile sizes)."""

    group: Group
    machine: CacheMachine
    effort: Effort
    computation: Named
    ways: Expressions
    found: GraphSearch
    begin: float
    end: float

    def run(self) -> Finding:
        ranked: list[tuple[SizedCut, BlockGraph]] = []
        for graph in self.found.found:
            best = cuts(self.computation, self.ways, graph, self.machine)[: self.effort.cuts]
            ranked += [(cut, graph) for cut in best]
        ranked.sort(key=lambda pair: pair[0].estimate_ns)
        most_ns = self.effort.worth * ranked[0][0].estimate_ns if ranked else 0.0
        ranked = [pair for pair in ranked if pair[0].estimate_ns <= most_ns]
        programs: list[FoundProgram] = []
        verdicts: dict[int, str] = {}
        refused: dict[str, int] = {}
        for cut, graph in ranked:
            is_over = time.monotonic() > self.end or len(programs) >= self.effort.programs
            if is_over or (id(graph) not in verdicts and len(verdicts) >= self.effort.graphs):
                continue
            if id(graph) not in verdicts:
                verdicts[id(graph)] = self._refusal(graph)
            reason = verdicts[id(graph)]
            made = None if reason else self._program(graph, cut)
            if isinstance(made, FoundProgram):
                programs.append(made)
            else:
                reason = reason or made or ""
                refused[reason] = refused.get(reason, 0) + 1
        now, found = time.monotonic(), self.found
        is_complete = found.is_complete and now <= self.end
        return Finding(
            tuple(programs), found.visited, dict(found.pruned), refused, now - self.begin, is_complete=is_complete
        )

    def _refusal(self, graph: BlockGraph) -> str:
        """Return why the verifier refuses a block graph, "" if it does not."""
        try:
            body = resized(self.group.body, small_sizes(self.computation, self.ways, graph))
            computation = named(body)
            if not computation.is_like(self.computation):
                return "with small sizes it is another computation"
            shapes = [body.types[value].shape for _, value in body.inputs]
            program = emit(computation, self.ways, graph, small_cut(computation, self.ways, graph), shapes)
        except (NotEmittedError, NotNamedError) as error:
            return str(error)
        return verify(program, body).reason

    def _program(self, graph: BlockGraph, cut: SizedCut) -> FoundProgram | str:
        packed = self._packed(graph, cut)
        sizes = BlockSizes(cut.blocks, self.machine.lanes, packed)
        shapes = [type_.shape for type_ in self.group.input_types]
        try:
            program = emit(self.computation, self.ways, graph, sizes, shapes)
            check_program(program)
        except (NotEmittedError, InvalidGraphError) as error:
            return str(error)
        turns = -(-self.computation.sizes[graph.loop] // cut.blocks[graph.loop]) if graph.loop else 1
        lines = tuple(describe(step) for step in graph.steps)
        return FoundProgram(stored_program(program), tuple(packed.items()), turns, lines, cut.estimate_ns)

    def _packed(self, graph: BlockGraph, cut: SizedCut) -> dict[int, int]:
        """Return the constant matrices that are only used as second operands, with the columns of their panels."""
        sizes = {**self.computation.sizes, **cut.blocks}
        found: dict[int, int] = {}
        for t, expression in self.ways.inputs.items():
            term = self.computation.terms[t]
            readers = [s for s in graph.steps if expression in {x.expression for x in s.operands}]
            if term.position not in self.group.constant_inputs or len(readers) != 1 or len(term.places) != 2:
                continue
            (step,) = readers
            columns = term.places[1]
            is_second = step.kind is StepKind.CONTRACT and term.places[0] == step.axis and columns != ""
            if not is_second or columns != columns_of(self.computation, self.ways, step):
                continue
            rows = math.prod(sizes[axis] for axis in self.ways.axes[step.result.expression] if axis != columns)
            is_whole, lanes = sizes[columns] == self.computation.sizes[columns], self.machine.lanes
            if vectors := vectors_of_panels(rows, sizes[columns], lanes, is_whole):
                found[term.position] = vectors * lanes
        return found


def describe(step: BlockStep) -> str:
    """Return a step of a block graph as one line."""
    operands = ", ".join(f"e{x.expression}" for x in step.operands)
    op = (
        "contract"
        if step.kind is StepKind.CONTRACT
        else " ".join([*(x.op for x in step.body), *([step.op] if step.axis else [])])
    )
    along = f" along {step.axis}" if step.axis else ""
    where = f", carried{f', rescaled by e{step.follows}' if step.follows >= 0 else ''}" if step.is_carried else ""
    return f"{step.result.phase.name.lower()}: e{step.result.expression} = {op}({operands}){along}{where}"
