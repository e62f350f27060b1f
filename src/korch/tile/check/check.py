"""The properties that every tile program must have: small named checks.

They find mistakes of lowering before a compiler or a crash does. Whether the results are right is
tested with the interpreter in `korch.tile.check.reference`. A program with parameters must have each
property for all values of its parameters.
"""

from collections.abc import Callable, Iterator

from korch.errors import InvalidGraphError
from korch.primitive.op import Category
from korch.primitive.ops import OPS
from korch.primitive.types import DType
from korch.tile.check.accesses import accesses, accesses_of, accesses_of_choice
from korch.tile.check.digits import ranges_of_axes
from korch.tile.check.places import indices_stay_inside, tasks_do_not_race
from korch.tile.ir.index import Expr, Ranges, Var, add, bounds, scale
from korch.tile.ir.passes import expressions_of, turns_on
from korch.tile.ir.program import (
    WIDENED,
    Accumulate,
    Apply,
    Axis,
    Contract,
    Level,
    Loop,
    Panels,
    Pass,
    Product,
    Size,
    Split,
    Stage,
    Step,
    TileProgram,
    arguments_of,
    parts_of,
    written_by,
)
from korch.tile.ir.sort import Sort
from korch.tile.ir.text import format_contract, format_op, format_sink


def check_program(program: TileProgram) -> tuple[str, ...]:
    """Run every check; return a line for each property that is neither proved nor refuted.

    Raises:
        InvalidGraphError: a check fails; the text names the offending line.
    """
    return tuple(line for check in CHECKS for line in check(program) or ())


def buffers_are_known(program: TileProgram) -> None:
    """Buffer names are unique, only known buffers are accessed, and inputs are not written."""
    levels = {buffer.name: buffer.level for buffer in program.buffers}
    _require(len(levels) == len(program.buffers), "two buffers have one name", "")
    for stage in program.stages:
        for access in accesses(stage):
            _require(access.buffer in levels, "there is no such buffer", access.text)
            is_input = access.is_write and levels[access.buffer] is Level.INPUT
            _require(not is_input, "an input is written", access.text)


def layouts_fit(program: TileProgram) -> None:
    """Panels divide the columns of a matrix evenly, whole groups of rows its elements; split elements are floats."""
    for buffer in program.buffers:
        for layout in buffer.layout:
            if isinstance(layout, Panels):
                is_whole = layout.width > 0 and layout.columns > 0 and layout.columns % layout.width == 0
                whole = layout.columns * layout.group
                is_whole &= whole > 0 and isinstance(buffer.elements, int) and buffer.elements % whole == 0
                _require(is_whole, "panels do not divide a buffer", buffer.name)
            if isinstance(layout, Split):
                is_float = buffer.dtype.is_float and layout.dtype.is_float
                _require(is_float and layout.components > 0, "a buffer can't be split", buffer.name)


def sizes_are_known(program: TileProgram) -> None:
    """Parameters have unique names and valid ranges; sizes depend on parameters only and are not negative."""
    ranges = program.parameter_ranges
    _require(len(ranges) == len(program.parameters), "two parameters have one name", "")
    for parameter in program.parameters:
        _require(0 <= parameter.low <= parameter.high, "the range of a parameter is empty or negative", parameter.name)
    for buffer in program.buffers:
        _require_size(buffer.elements, ranges, buffer.name)
    for stage, outer, step in _leaves(program):
        around = {**ranges, **ranges_of_axes(outer, ranges)}
        for axis in (*stage.grid, *outer, *step.axes):
            _require_size(axis.size, ranges, axis.name)
            if axis.ragged is not None:
                _require_size(axis.ragged[1], around, axis.name)


def axes_are_sound(program: TileProgram) -> None:
    """Loop variables are unique; kept loops come before reduced ones; grid axes are never reduced; tiles cover axes."""
    ranges = program.parameter_ranges
    for stage, outer, step in _leaves(program):
        axes = (*stage.grid, *outer, *step.axes)
        names = [axis.name for axis in axes]
        text = " ".join(names)
        _require(len(set(names) | ranges.keys()) == len(names) + len(ranges), "two loops have one variable", text)
        _require(not any(axis.is_reduced for axis in stage.grid), "a grid axis is reduced", text)
        for axis in outer:
            _require(not axis.is_reduced, "a loop around steps is reduced", axis.name)
        reduced = [axis.is_reduced for axis in axes]
        _require(reduced == sorted(reduced), "a reduced loop stands outside of a kept one", text)
        sizes = {axis.name: axis.size for axis in axes}
        for axis in axes:
            if axis.ragged is not None:
                name, total = axis.ragged
                _require(name in sizes, "the outer loop of a tile does not exist", axis.name)
                is_fixed = isinstance(axis.size, int) and axis.size > 0
                if isinstance(total, Expr) and not total.variables <= ranges.keys():  # depends on a loop variable
                    total = bounds(total, {**ranges, **ranges_of_axes(axes, ranges)})[1]
                is_capped = isinstance(total, Expr) and not all(isinstance(atom, Var) for atom, _ in total.terms)
                is_covered = is_fixed and _covers(sizes[name], parts_of(total, axis.extent, ranges), ranges, is_capped)
                _require(is_covered, "tiles do not cover their axis", axis.name)


def _covers(tiles: Size, needed: Size, ranges: Ranges, is_capped: bool) -> bool:
    """Return whether there are as many tiles as needed, for all values of parameters.

    Trimmed programs have exceptions. If only the number of tiles depends on parameters, it must be right for their
    largest values. If only the needed number does, there must be enough; a single tile is an axis that ends early. If
    the length of the axis is capped, tiles behind its end are empty.
    """
    if isinstance(needed, int):
        return (tiles if isinstance(tiles, int) else bounds(tiles, ranges)[1]) == needed
    if isinstance(tiles, int):
        return tiles == 1 or bounds(needed, ranges)[1] <= tiles
    return is_capped or bounds(add(tiles, scale(needed, -1)), ranges) == (0, 0)


def vector_is_an_axis(program: TileProgram) -> None:
    """The vector axis, if there is one, is a loop of its pass."""
    for _, pass_ in _passes(program):
        if pass_.vector:
            names = [axis.name for axis in pass_.axes]
            _require(pass_.vector in names, "the vector axis is no loop of its pass", pass_.vector)


def squares_are_free(program: TileProgram) -> None:
    """The two axes of transposed squares are the innermost loops of a pass of stores; no guard depends on `across`."""
    for _, pass_ in _passes(program):
        if pass_.across:
            names = [axis.name for axis in pass_.axes]
            innermost = {pass_.across, pass_.vector}
            _require(set(names[-2:]) == innermost, "squares are no innermost loops", pass_.across)
            _require(not pass_.is_reduction, "squares are reduced", pass_.across)
            _require(not turns_on(pass_, pass_.across), "a guard turns inside of squares", pass_.across)


def choices_are_integers(program: TileProgram) -> None:
    """Sort keys and iteration numbers (`Loop.only`) are integers; a sort runs in one task, `Top` in one per row."""
    buffers = {buffer.name: buffer for buffer in program.buffers}
    integers = (DType.I64, DType.I32)
    for stage in program.stages:
        if (step := stage.sort) is not None:
            _require(not stage.steps, "a stage that sorts has steps", step.text)
            counts = (step.groups, step.block) if isinstance(step, Sort) else (step.count, step.size + 1 - step.count)
            _require(min(step.rows, *counts) > 0, "nothing is sorted", step.text)
            for name, size in (step.read, *step.written.items()):
                _require(buffers[name].elements == size, f"{name} has another size", step.text)
            types = {name: buffers[name].dtype for name, _ in (step.read, *step.written.items())}
            if isinstance(step, Sort):
                _require(not stage.grid, "a sort has tasks", step.text)
                allowed = {step.keys: integers} | dict.fromkeys(step.written, integers[1:])
            else:
                _require([a.size for a in stage.grid] == [step.rows], "a task is no row", step.text)
                allowed = {step.values: (types[step.source],), step.places: integers[:1]}
            for name, dtype in types.items():
                _require(dtype in allowed.get(name, (dtype,)), f"{name} has another type", step.text)
        for access in accesses(stage):
            if access.text.startswith("loop "):
                is_integer = buffers[access.buffer].dtype in integers and not buffers[access.buffer].layout
                _require(is_integer, "a turn is no integer", access.text)


def names_are_bound(program: TileProgram) -> None:
    """Each value is computed once, before it is used; indices use variables of enclosing loops only."""
    parameters = program.parameter_ranges.keys()
    for stage, outer, step in _leaves(program):
        grid = {axis.name for axis in (*stage.grid, *outer)} | parameters
        for access in accesses_of(step, outer):
            own = {axis.name for axis in access.axes}
            used = access.index.variables.union(*(guard.expr.variables for guard in access.guards))
            if reduced := {axis.name for axis in step.axes if axis.is_reduced} - own:
                _require(not used & reduced, "a place depends on a reduced loop", access.text)
            _require(used <= grid | own, "a variable is no loop", access.text)
        if isinstance(step, Contract):
            continue
        variables, bound = grid | {axis.name for axis in step.axes}, set[str]()
        for op in step.ops:
            text = format_op(op)
            _require(bound.issuperset(arguments_of(op)), "a value is used before it is bound", text)
            _require(op.name not in bound, "a value is bound twice", text)
            used_here = {v for expr in expressions_of(op) for v in expr.variables}
            _require(used_here <= variables, "a variable is no loop", text)
            bound.add(op.name)
        for sink in step.sinks:
            _require(sink.value in bound, "a value is used before it is bound", format_sink(sink))


def operations_are_elementwise(program: TileProgram) -> None:
    """Each `Apply` is an elementwise operation of the primitive table with the right number of arguments."""
    for _, pass_ in _passes(program):
        for op in pass_.ops:
            if isinstance(op, Apply):
                row = OPS.get(op.op)
                is_known = row is not None and row.category is Category.ELEMENTWISE
                _require(is_known, "this is no elementwise operation", format_op(op))
                fits = row is not None and row.arity == len(op.arguments)
                _require(fits, "an operation takes another number of values", format_op(op))


def sinks_suit_the_loops(program: TileProgram) -> None:
    """A pass has sinks that only store or only accumulate; stores need no reduced loops, accumulators no `where`."""
    for _, pass_ in _passes(program):
        _require(bool(pass_.sinks), "a pass writes nothing", pass_.vector)
        reduced = {axis.name for axis in pass_.axes if axis.is_reduced}
        for sink in pass_.sinks:
            text = format_sink(sink)
            is_accumulator = isinstance(sink, Accumulate)
            _require(is_accumulator == pass_.is_reduction, "a pass stores and accumulates", text)
            _require(is_accumulator or not reduced, "a store stands in a reduced loop", text)
            _require(not (is_accumulator and pass_.where), "a pass that accumulates leaves points out", text)


def products_fit(program: TileProgram) -> None:
    """Operands and accumulators of contractions have the types that their product requires.

    Operands of a float32 product, split into components or not, may also be 16-bit floats, and the second operand may
    be bytes: they are widened when they are read, as are factors.
    """
    types = {buffer.name: buffer.dtype for buffer in program.buffers}
    for _, _, step in _leaves(program):
        if isinstance(step, Contract):
            a, b, total = step.product.types
            wanted = {step.a.buffer: a, step.b.buffer: b, step.out.buffer: total}
            wanted |= {at.buffer: total for at in (step.rescale, step.factor) if at is not None}
            if step.product in (Product.F32, Product.SPLIT):
                halves = (DType.F16, DType.BF16)
                for at, narrow in ((step.a, halves), (step.b, WIDENED), (step.factor, halves)):
                    if at is not None and types[at.buffer] in narrow:
                        wanted.pop(at.buffer, None)
            for name, dtype in wanted.items():
                what = f"{name} is of type {types[name].value}, not {dtype.value}"
                _require(types[name] is dtype, what, format_contract(step))


def buffers_are_written_first(program: TileProgram) -> None:
    """A step reads only inputs and buffers written before; a tile must be written by an earlier step of its stage.

    A tile that a loop writes and does not carry must be written in each iteration before it is read.
    """
    levels = {buffer.name: buffer.level for buffer in program.buffers}
    tiles = {name for name, level in levels.items() if level is Level.TILE}
    written = {name for name, level in levels.items() if level is Level.INPUT}
    for stage in program.stages:
        if stage.sort is not None:
            _require(stage.sort.read[0] in written, "a buffer is read before it is written", stage.sort.text)
            written |= stage.sort.written.keys()
        written = _written_after(stage.steps, (), written, tiles) - tiles
    for buffer in program.buffers:
        is_missing = buffer.level is Level.OUTPUT and buffer.name not in written and buffer.elements != 0
        _require(not is_missing, "an output is never written", buffer.name)


def _written_after(steps: tuple[Step, ...], outer: tuple[Axis, ...], written: set[str], tiles: set[str]) -> set[str]:
    """Return the buffers that are written after some steps, given those written before."""
    for step in steps:
        if isinstance(step, Loop):
            for access in accesses_of_choice(step, outer):
                _require(access.buffer in written, "a buffer is read before it is written", access.text)
            for name in step.carried:
                _require(name in tiles, "what a loop carries is no tile", name)
                _require(name in written, "a carried tile is not written before its loop", name)
            lost = (written_by(step.body) & tiles) - {*step.carried}
            written = _written_after(step.body, (*outer, step.axis), written - lost, tiles) - lost
            continue
        for access in accesses_of(step, outer):
            if not access.is_write:
                _require(access.buffer in written, "a buffer is read before it is written", access.text)
        written = written | written_by((step,))
    return written


CHECKS: tuple[Callable[[TileProgram], list[str] | None], ...] = (
    buffers_are_known,
    layouts_fit,
    sizes_are_known,
    axes_are_sound,
    vector_is_an_axis,
    choices_are_integers,
    squares_are_free,
    names_are_bound,
    operations_are_elementwise,
    sinks_suit_the_loops,
    products_fit,
    buffers_are_written_first,
    indices_stay_inside,
    tasks_do_not_race,
)
"""All checks, in order; later checks rely on earlier ones."""


def _leaves(program: TileProgram) -> Iterator[tuple[Stage, tuple[Axis, ...], Pass | Contract]]:
    for stage in program.stages:
        for loops, step in stage.leaves:
            yield stage, tuple(loop.axis for loop in loops), step


def _passes(program: TileProgram) -> Iterator[tuple[Stage, Pass]]:
    return ((stage, step) for stage, _, step in _leaves(program) if isinstance(step, Pass))


def _require_size(size: Size, ranges: Ranges, name: str) -> None:
    is_known = isinstance(size, int) or size.variables <= ranges.keys()
    _require(is_known, f"the size {size} depends on what is no parameter", name)
    low = size if isinstance(size, int) else bounds(size, ranges)[0]
    _require(low >= 0, f"the size {size} may be negative", name)


def _require(condition: bool, what: str, line: str) -> None:
    if not condition:
        raise InvalidGraphError(what, where=f"tile program, {line!r}" if line else "tile program")
