"""Block graph -> sizes of its tiles, those with the least estimated time first.

The estimate includes work that tasks repeat because they share no results, vectors and registers that are not full,
threads that wait, and bytes that tasks read during the arithmetic. Tiles must fit in a core's cache. The constants
were fitted to 60 programs on an AMD EPYC (AVX2, 2 threads).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from korch.superopt.axes import TWIN, Named
from korch.superopt.emit import VECTORS, rows_together, vectors_of_panels
from korch.superopt.expressions import Expressions
from korch.superopt.frame import BlockSizes
from korch.superopt.generate import TRANSCENDENTAL, BlockGraph, BlockStep, StepKind
from korch.system.alignment import round_up

ROW_BLOCKS = (1, 6, 12, 24, 48, 96)
COLUMN_BLOCKS = (16, 48, 64, 128, 192, 256, 512, 528)
"""Columns of a task; the multiples of 48 are for wide panels."""

TURN_BLOCKS = (32, 64, 128, 256, 512)

TURN_NS = 40.0
"""The overhead of an iteration of a loop, or of a task, beyond its arithmetic."""

ELEMENT_SHARE = 0.25
"""The share of their best rate at which elementwise operations run."""

BYTES_PER_NS = 30.0
"""Bytes that a core reads from the shared cache in a nanosecond."""

MEANWHILE = 0.3
"""The share of the shorter of the two times, arithmetic and reading, that adds to the longer one."""

NEAR_BYTES = 1 << 14
"""A tile of at least this size does not stay in the L1 cache."""

FAR_BYTES_PER_NS = 28.0
"""Bytes that a core writes to or reads from its L2 cache in a nanosecond."""

AGAIN_BYTES_PER_NS = 100.0
"""Bytes of a contraction's second operand that a core rereads from L2 in a nanosecond, while it multiplies."""

SUMS = 9
"""Vectors of sums that a contraction needs so that hardly any addition waits for the previous one."""

CYCLES_PER_NS = 3.0


@dataclass(frozen=True, slots=True)
class SizedCut:
    """Sizes, with the estimated time in nanoseconds."""

    blocks: Mapping[str, int]
    estimate_ns: float


@dataclass(frozen=True, slots=True)
class CacheMachine:
    """The machine that sizes are chosen for: lanes of a vector, threads, and the bytes of a core's cache."""

    lanes: int
    threads: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of axes: those of which a task has one element, those that it holds whole, and columns."""

    single: frozenset[str]
    whole: frozenset[str]
    columns: frozenset[str]


def columns_of(computation: Named, ways: Expressions, step: BlockStep) -> str:
    """Return the axis of the columns of a contraction's result, "" if the result has one element."""
    kept = [axis for axis in computation.order if axis in ways.axes[step.result.expression]]
    return kept[-1] if kept else ""


def roles_of(computation: Named, ways: Expressions, graph: BlockGraph) -> Roles:
    """Return which axes may be cut, and how."""
    order = computation.order
    whole = {step.axis for step in graph.steps if step.axis and step.axis != graph.loop}
    single, columns = set[str](), set[str]()
    for step in graph.steps:
        if step.kind is StepKind.CONTRACT:
            x, y = (set(ways.axes[operand.expression]) for operand in step.operands)
            kept = [axis for axis in order if axis in ways.axes[step.result.expression]]
            single |= x & y & set(kept)
            free = [axis for axis in kept if axis not in single]
            columns |= set(free[-1:])
            rows = free[:-1]
            second = y if free and free[-1] in y else x
            own = [axis for axis in rows if axis not in second]
            single |= {axis for axis in rows if axis in second} | set(own[:-1])
    return Roles(frozenset(single), frozenset(whole), frozenset(columns))


def cuts(computation: Named, ways: Expressions, graph: BlockGraph, machine: CacheMachine) -> list[SizedCut]:
    """Return sizes whose tiles fit, the fastest by estimate first."""
    roles = roles_of(computation, ways, graph)
    if roles.single & roles.whole or graph.loop in roles.single:
        return []
    axes = [axis for axis in computation.result if axis and axis not in roles.whole]
    axes += [graph.loop] if graph.loop else []
    found = []
    for blocks in itertools.product(*(_blocks(axis, computation, roles, graph.loop) for axis in axes)):
        cut = dict(zip(axes, blocks, strict=True))
        has_turns = not graph.loop or cut[graph.loop] < computation.sizes[graph.loop]  # one iteration is no loop
        if has_turns and _tile_bytes(computation, ways, graph, cut) <= machine.cache_bytes:
            found.append(SizedCut(cut, _estimate_ns(computation, ways, graph, cut, machine)))
    return sorted(found, key=lambda cut: cut.estimate_ns)


def small_sizes(computation: Named, ways: Expressions, graph: BlockGraph) -> dict[str, int]:
    """Return small sizes of all axes, for the verifier."""
    roles = roles_of(computation, ways, graph)
    names = {axis.removesuffix(TWIN): axis in roles.single for axis in computation.sizes}
    lengths = {name: 2 if is_single else 4 + i % 4 for i, (name, is_single) in enumerate(names.items())}
    return {axis: min(n, lengths[axis.removesuffix(TWIN)]) for axis, n in computation.sizes.items()}


def small_cut(computation: Named, ways: Expressions, graph: BlockGraph) -> BlockSizes:
    """Return block sizes for the small sizes, such that last blocks are shorter."""
    roles = roles_of(computation, ways, graph)
    cut = [axis for axis in computation.result if axis and axis not in roles.whole]
    cut += [graph.loop] if graph.loop else []
    return BlockSizes({axis: 1 if axis in roles.single else min(3, computation.sizes[axis]) for axis in cut}, 2)


def _blocks(axis: str, computation: Named, roles: Roles, loop: str) -> list[int]:
    size = computation.sizes[axis]
    if axis in roles.single:
        return [1]
    if axis == loop:
        return sorted({min(size, block) for block in TURN_BLOCKS})
    choices = COLUMN_BLOCKS if axis in roles.columns else ROW_BLOCKS
    return sorted({min(size, block) for block in choices} | {size})


def _tile_bytes(computation: Named, ways: Expressions, graph: BlockGraph, cut: Mapping[str, int]) -> int:
    sizes = {**computation.sizes, **cut}
    held = (step for step in graph.steps if step.axis or len(ways.axes[step.result.expression]) > 1)
    return 4 * sum(math.prod(sizes[axis] for axis in ways.axes[step.result.expression]) for step in held)


def _estimate_ns(
    computation: Named, ways: Expressions, graph: BlockGraph, cut: Mapping[str, int], machine: CacheMachine
) -> float:
    sizes = {**computation.sizes, **cut}
    counts = {axis: -(-computation.sizes[axis] // block) for axis, block in cut.items()}
    grid = {axis: n for axis, n in counts.items() if axis in computation.result}
    tasks, turns = math.prod(grid.values()), counts.get(graph.loop, 1) if graph.loop else 1
    ns = TURN_NS * tasks * turns
    for step in graph.steps:
        axes = {axis for x in step.operands for axis in ways.axes[x.expression]}
        runs = tasks * (turns if graph.loop in axes else 1)
        own_ns = _step_ns(step, computation, ways, axes, sizes, machine)
        ns += runs * (own_ns + _far_ns(step, computation, ways, sizes))
    read = sum(_read_bytes(computation, ways, sizes, tasks, turns, graph.loop))
    waves = round_up(tasks, machine.threads) / tasks
    shorter, longer = sorted((ns, read / BYTES_PER_NS))
    return (longer + MEANWHILE * shorter) * waves / machine.threads


def _step_ns(
    step: BlockStep,
    computation: Named,
    ways: Expressions,
    axes: Set[str],
    sizes: Mapping[str, int],
    machine: CacheMachine,
) -> float:
    rate = machine.lanes * CYCLES_PER_NS
    points = math.prod(sizes[axis] for axis in axes)
    if step.kind is not StepKind.CONTRACT:
        ops = [x.op for x in step.body] + ([step.op] if step.axis else [])
        return points * sum(8 if op in TRANSCENDENTAL else 1 for op in ops) / (rate * ELEMENT_SHARE)
    kept = [axis for axis in axes if axis != step.axis and axis in ways.axes[step.result.expression]]
    last = max(kept, key=lambda axis: sizes[axis], default="")
    *_, rows, columns = (1, 1, *sorted(sizes[axis] for axis in kept))
    is_whole = last == "" or columns == computation.sizes[last]
    vectors = vectors_of_panels(rows, columns, machine.lanes, is_whole) or VECTORS
    strip, together = vectors * machine.lanes, rows_together(rows, machine.lanes)
    blocks = -(-rows // together)
    full = rows / (blocks * together) * columns / round_up(columns, strip)
    full *= min(1.0, together * vectors / SUMS)
    terms = sizes[step.axis]
    again = 4 * terms * columns * (blocks - 1) / AGAIN_BYTES_PER_NS if 4 * terms * strip >= NEAR_BYTES else 0.0
    return points / (2 * rate * max(full, 0.02)) + again * points / (rows * columns * terms)


def _far_ns(step: BlockStep, computation: Named, ways: Expressions, sizes: Mapping[str, int]) -> float:
    """Return the time to store and load a copy of the second operand of a contraction, if it is large."""
    if step.kind is not StepKind.CONTRACT:
        return 0.0
    columns = columns_of(computation, ways, step)
    places = {ways.inputs[t]: computation.terms[t].places for t in ways.inputs}
    for operand in step.operands:
        axes = ways.axes[operand.expression]
        if columns and columns in axes and places.get(operand.expression, ("",))[-1] != columns:
            size_bytes = 4 * math.prod(sizes[axis] for axis in axes)
            return 2 * size_bytes / FAR_BYTES_PER_NS if size_bytes > NEAR_BYTES else 0.0
    return 0.0


def _read_bytes(
    computation: Named, ways: Expressions, sizes: Mapping[str, int], tasks: int, turns: int, loop: str
) -> Iterator[int]:
    for number, expression in ways.inputs.items():
        axes = ways.axes[expression]
        if computation.terms[number].op != "input":
            continue
        yield 4 * tasks * (turns if loop in axes else 1) * math.prod(sizes[axis] for axis in axes)
