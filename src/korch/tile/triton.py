"""Tile program -> Triton kernels, one launch per stage.

A launch works on tiles of rows and columns. Of a stage with reductions the rows are tasks and the
columns the points of a pass, so that a row is reduced by a few instructions; numbers that a task
hands from pass to pass stay in registers, and what several passes read is read once where a row is
one tile. Where tasks are too few to fill the device, each pass becomes a launch of its own over
parts of the rows (`split`), and the next one adds up what they left. Of a stage without reductions
the columns are its points; where it turns a matrix, rows and columns are the two axes that are read
and written side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from korch.primitive.types import DType
from korch.tile.index import Expr, add, scale, var
from korch.tile.program import Accumulate, Axis, Buffer, Level, Load, Pass, Stage, TileProgram, identity
from korch.tile.triton_text import COLUMNS, COMPUTE, ROWS, STORED, Coordinate, Text, literal, power_of_two

MOST_SERIAL = 128
"""Windows of at most this many points are a loop of single points if rows lie side by side."""

LONGEST_ROW = 4096
"""Columns of the widest tile of a reduction."""

PARTS = 256
"""Most parts of a split row: one tile adds them up."""

TASK = "task"
"""The variable of a stage's task, in places of tiles that are in memory."""

_COMBINE = {"sum": "{} + {}", "prod": "{} * {}", "max": "f.larger({}, {})", "min": "f.smaller({}, {})"}
_FUNCTION = {"sum": "f.added", "prod": "f.multiplied", "max": "f.larger", "min": "f.smaller"}


@dataclass(frozen=True, slots=True)
class Printed:
    """One launch.

    Attributes:
        source: the text of a Triton function named NAME.
        buffers: the buffers that it takes, in order; those that it names itself begin with "c"
            (tables) or "s" (partial results).
        grid: programs.
        warps: warps of a program.
        stages: loads that are under way at a time.
    """

    source: str
    buffers: tuple[str, ...]
    grid: int
    warps: int
    stages: int = 2


@dataclass
class PrintedProgram:
    """All launches of a program, and the memory that they use beside inputs and outputs.

    Attributes:
        launches: in order.
        scratch: names, types and sizes in elements.
        tables: names of constant tables and their entries.
    """

    launches: list[Printed] = field(default_factory=list)
    scratch: dict[str, tuple[DType, int]] = field(default_factory=dict)
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, text: Text, comment: str, grid: int, warps: int, stages: int = 2) -> None:
        """Add the launch of a text; equal tables of several launches are one.

        Args:
            text: the lines of the function, with the buffers and tables that it uses.
            comment: stands at the head of the function.
            grid: programs.
            warps: warps of a program.
            stages: loads that are under way at a time.
        """
        renamed = {}
        for table, name in text.tables.items():
            known = next((n for n, t in self.tables.items() if t == table), None)
            renamed[name] = known or f"c{len(self.tables)}"
            self.tables[renamed[name]] = table
        head = "".join(f"    # {line}\n" for line in comment.splitlines())
        parameters = ", ".join(f"p_{name}" for name in text.arguments)
        body = "\n".join(text.lines)
        source = f"@triton.jit\ndef NAME({parameters}):\n{head}{body}\n"
        buffers = tuple(renamed.get(name, name) for name in text.arguments)
        self.launches.append(Printed(source, buffers, grid, warps, stages))


def print_triton(program: TileProgram, comment: str, processors: int, split: bool = False) -> PrintedProgram:
    """Print a program.

    Args:
        program: lowered for one lane, so that every kept axis of a reduction is a grid axis.
        comment: text that stands at the head of each function.
        processors: multiprocessors of the device.
        split: whether rows are cut into parts where tasks are few.
    """
    found = PrintedProgram()
    for buffer in program.buffers:
        if buffer.level is Level.WORKSPACE:
            found.scratch[buffer.name] = (buffer.dtype, buffer.size)
    for stage in program.stages:
        if stage.tasks == 0 or not stage.passes:
            continue
        if stage_is_free(stage):
            _FreeStage(program, stage, comment, found, processors).print()
        elif split and stage_is_splittable(program, stage, processors):
            _SplitStage(program, stage, comment, found, processors).print()
        else:
            _RowStage(program, stage, comment, found, processors).print()
    return found


def stage_is_free(stage: Stage) -> bool:
    """Return whether a stage has no reduction."""
    return len(stage.passes) == 1 and not stage.passes[0].is_reduction


def stage_is_splittable(program: TileProgram, stage: Stage, processors: int) -> bool:
    """Return whether a stage's tasks are few and long, and hand on numbers only."""
    if stage_is_free(stage) or stage.tasks >= 2 * processors:
        return False
    longest = max(math.prod(axis.extent for axis in p.axes) for p in stage.passes)
    single = all(not pass_.is_reduction or all(axis.is_reduced for axis in pass_.axes) for pass_ in stage.passes)
    tiles = [b for b in program.buffers if b.level is Level.TILE and _is_used(stage, b.name)]
    stored = {s.buffer for p in stage.passes for s in p.sinks}
    loaded = {op.buffer for p in stage.passes for op in p.ops if isinstance(op, Load)}
    reread = {name for name in stored & loaded if program.buffer(name).level is not Level.TILE}
    return longest >= 4096 and single and all(b.size == 1 for b in tiles) and not reread


def _is_used(stage: Stage, name: str) -> bool:
    return any(sink.buffer == name for pass_ in stage.passes for sink in pass_.sinks)


def _warps(elements: int) -> int:
    return min(8, max(1, elements // 256))


class _Launch:
    """What the three kinds of launches share."""

    def __init__(
        self, program: TileProgram, stage: Stage, comment: str, found: PrintedProgram, processors: int
    ) -> None:
        self.program = program
        self.stage = stage
        self.comment = comment
        self.found = found
        self.processors = processors
        self.sizes = {buffer.name: buffer.size for buffer in program.buffers}
        self.text = Text()

    def buffer(self, name: str) -> Buffer:
        return self.program.buffer(name)

    def finish(self, grid: int, warps: int) -> None:
        """Add the launch that has been written, and begin another."""
        self.found.add(self.text, self.comment, grid, warps)
        self.text = Text()

    def program_id(self) -> None:
        """Write the program's number; it is wide if some index needs that."""
        wide = max(self.sizes.values(), default=0) >= 1 << 31
        self.text.line(f"pid = tl.program_id(0){'.to(tl.int64)' if wide else ''}")


class _FreeStage(_Launch):
    """A loop nest of stores: columns are its points, or a turned matrix is a tile."""

    def print(self) -> None:
        pass_ = _whole(self.stage)
        rows = self._turned(pass_)
        text = self.text
        self.program_id()
        at: dict[str, Coordinate] = {}
        masks: dict[int, str] = {}
        if rows is None:
            total = math.prod(axis.extent for axis in pass_.axes)
            wide = 1024 if total >= 1024 * 4 * self.processors else 256
            columns = min(wide, power_of_two(total))
            grid, shape = -(-total // columns), [1, columns]
            text.line(f"c = pid * {columns} + tl.arange(0, {columns})[None, :]")
            at |= text.split("c", [(a.name, a.extent) for a in pass_.axes], COLUMNS)
            if total % columns:
                masks[1] = "inside"
                text.line(f"inside = c < {total}")
        else:
            column = next(a for a in pass_.axes if a.name == pass_.vector)
            others = [a for a in pass_.axes if a not in (rows, column)]
            height, width = min(64, power_of_two(rows.extent)), min(64, power_of_two(column.extent))
            down, across = -(-rows.extent // height), -(-column.extent // width)
            grid, shape = down * across * math.prod(a.extent for a in others), [height, width]
            at |= text.split(
                "pid", [*((a.name, a.extent) for a in others), ("down", down), ("across", across)], frozenset()
            )
            for axis, name, place, size in ((0, "r", rows, height), (1, "c", column, width)):
                tile = at["down" if axis == 0 else "across"].text
                spread = "[:, None]" if axis == 0 else "[None, :]"
                text.line(f"{name} = {tile} * {size} + tl.arange(0, {size}){spread}")
                at[place.name] = Coordinate(name, frozenset((axis,)))
                if place.extent % size:
                    masks[axis] = f"{name}_inside"
                    text.line(f"{name}_inside = {name} < {place.extent}")
        values: dict[str, str] = {}
        types: dict[str, DType] = {}
        text.ops(pass_.ops, at, masks, values, types)
        for sink in pass_.sinks:
            dtype = self.buffer(sink.buffer).dtype
            text.store(sink.buffer, dtype, sink.index, values[sink.value], at, masks, str(shape))
        self.finish(grid, _warps(math.prod(shape)))

    def _turned(self, pass_: Pass) -> Axis | None:
        """Return the axis along which the largest load is contiguous, if it is not the vector's."""
        loads = [op for op in pass_.ops if isinstance(op, Load)]
        sized = [op for op in loads if op.index.coefficient(pass_.vector) != 0]
        if not sized or not pass_.vector:
            return None
        largest = max(sized, key=lambda op: self.sizes[op.buffer])
        if largest.index.coefficient(pass_.vector) == 1:
            return None
        found = [a for a in pass_.axes if largest.index.coefficient(a.name) == 1]
        found = [a for a in found if a.name != pass_.vector and a.extent >= 4]
        return found[0] if found and _extent(pass_, pass_.vector) >= 4 else None


def _extent(pass_: Pass, name: str) -> int:
    return next(axis.extent for axis in pass_.axes if axis.name == name)


def _whole(stage: Stage) -> Pass:
    """Return the one pass of a free stage with the grid's axes among its own."""
    pass_ = stage.passes[0]
    if any(axis.ragged for axis in pass_.axes):
        raise AssertionError("a free stage is cut for threads before it is printed as Triton")
    return replace(pass_, axes=(*stage.grid, *pass_.axes))


class _RowStage(_Launch):
    """Rows are tasks; passes run over columns."""

    def print(self) -> None:
        stage, text = self.stage, self.text
        self.spill()
        rows, columns = self.tile()
        self.program_id()
        tasks = stage.tasks
        text.line(f"r = pid * {rows} + tl.arange(0, {rows})[:, None]")
        masks = {}
        if tasks % rows:
            text.line(f"r_inside = r < {tasks}")
            masks[0] = "r_inside"
        at = text.split("r", [(a.name, a.extent) for a in self.grid()], ROWS)
        at[TASK] = Coordinate("r", ROWS)
        values: dict[str, str] = {}
        types: dict[str, DType] = {}
        memo: dict[str, str] = {}
        passes = [self.addressed(pass_) for pass_ in stage.passes]
        for number, pass_ in enumerate(passes):
            later = [op for p in passes[number + 1 :] for op in p.ops if isinstance(op, Load)]
            self.pass_(pass_, rows, columns[number], at, masks, values, types, memo, later)
            written = {sink.buffer for sink in pass_.sinks} & {op.buffer for op in later}
            if any(name not in values for name in written):
                text.line("tl.debug_barrier()")
                memo.clear()
        self.finish(-(-tasks // rows), _warps(rows * max(columns)))

    def grid(self) -> list[Axis]:
        """Return the grid's axes, that which is read side by side last."""
        score = {axis.name: 0 for axis in self.stage.grid}
        for op in (op for p in self.stage.passes for op in p.ops if isinstance(op, Load)):
            for name in score:
                if op.index.coefficient(name) == 1:
                    score[name] += self.sizes[op.buffer]
        best = max(score, key=lambda name: score[name], default=None)
        if best is None or score[best] == 0:
            return list(self.stage.grid)
        return sorted(self.stage.grid, key=lambda axis: axis.name == best)

    def tile(self) -> tuple[int, list[int]]:
        """Return the rows of a tile, and the columns for each pass; 1 column is a serial loop."""
        grid = self.grid()
        last = grid[-1].name if grid else ""
        beside = side = 0
        for pass_ in self.stage.passes:
            for op in pass_.ops:
                if isinstance(op, Load):
                    size = self.sizes[op.buffer]
                    beside += size * (op.index.coefficient(last) == 1 if last else 0)
                    inner = [a.name for a in pass_.axes]
                    side += size * any(op.index.coefficient(name) == 1 for name in inner)
        extents = [math.prod(a.extent for a in _columns_of(p)) for p in self.stage.passes]
        tasks, longest = self.stage.tasks, max(extents)
        if beside > side and longest <= MOST_SERIAL:
            rows = min(256, power_of_two(tasks))
            while rows > 32 and -(-tasks // rows) < 2 * self.processors:
                rows //= 2
            return rows, [1 for _ in extents]
        if beside > side:
            rows = min(64, power_of_two(tasks))
            while rows > 16 and -(-tasks // rows) < self.processors:
                rows //= 2
            return rows, [min(power_of_two(n), max(16, 2048 // rows)) for n in extents]
        width = min(power_of_two(longest), LONGEST_ROW)
        rows = 1
        while rows * width < 1024 and -(-tasks // (2 * rows)) >= 2 * self.processors:
            rows *= 2
        return rows, [min(power_of_two(n), width) for n in extents]

    def addressed(self, pass_: Pass) -> Pass:
        """Return a pass in which the place of a tile in memory depends on its task."""

        def index_of(name: str, index: Expr) -> Expr:
            buffer = self.buffer(name)
            if buffer.level is not Level.TILE or buffer.size == 1:
                return index
            return add(index, scale(var(TASK), buffer.size))

        ops = tuple(
            replace(op, index=index_of(op.buffer, op.index)) if isinstance(op, Load) else op for op in pass_.ops
        )
        sinks = tuple(replace(s, index=index_of(s.buffer, s.index)) for s in pass_.sinks)
        return replace(pass_, ops=ops, sinks=sinks)

    def spill(self) -> None:
        """Put tiles of more than a number into memory."""
        for buffer in self.program.buffers:
            if buffer.level is Level.TILE and buffer.size > 1 and _is_used(self.stage, buffer.name):
                self.found.scratch[buffer.name] = (buffer.dtype, buffer.size * self.stage.tasks)

    def pass_(
        self,
        pass_: Pass,
        rows: int,
        columns: int,
        at: dict[str, Coordinate],
        masks: dict[int, str],
        values: dict[str, str],
        types: dict[str, DType],
        memo: dict[str, str],
        later: Sequence[Load],
    ) -> None:
        """Write a pass; `later` are the loads of those that follow."""
        text = self.text
        serial = [a for a in pass_.axes if pass_.is_reduction and not a.is_reduced]
        points = _columns_of(pass_)
        total = math.prod(a.extent for a in points)
        depth = text.depth
        here = dict(at)
        if serial:
            count = math.prod(a.extent for a in serial)
            k = text.fresh("k")
            text.line(f"for {k} in range({count}):")
            text.depth += 1
            here |= text.split(k, [(a.name, a.extent) for a in serial], frozenset())
        accumulators = [self.begin(sink, rows, columns) for sink in pass_.sinks if isinstance(sink, Accumulate)]
        inner_masks = dict(masks)
        is_straight = total <= columns and not serial and columns > 1
        if columns == 1:
            c = text.fresh("c")
            text.line(f"for {c} in {'tl.static_range' if total <= 16 else 'range'}({total}):")
            text.depth += 1
            here |= text.split(c, [(a.name, a.extent) for a in points], frozenset())
        else:
            # Equal names for equal columns, so that passes share what they read.
            c = f"c{total}x{columns}" if is_straight else text.fresh("c")
            base = ""
            if total > columns:
                base = text.fresh("b")
                text.line(f"for {base} in range(0, {total}, {columns}):")
                text.depth += 1
                base += " + "
            definition = f"{c} = {base}tl.arange(0, {columns})[None, :]"
            if definition not in memo:
                text.line(definition)
                if is_straight:
                    memo[definition] = c
            if total % columns:
                inner_masks[1] = f"({c} < {total})"
            here |= self.split_columns(c, points, memo if is_straight else None)
        inner, inner_types = dict(values), dict(types)
        text.ops(pass_.ops, here, inner_masks, inner, inner_types, memo if is_straight else None)
        shape = f"[{rows}, {columns}]"
        for sink in pass_.sinks:
            if isinstance(sink, Accumulate):
                self.collect(sink, accumulators.pop(0), inner[sink.value], inner_masks)
            else:
                dtype = self.buffer(sink.buffer).dtype
                text.store(sink.buffer, dtype, sink.index, inner[sink.value], here, inner_masks, shape)
        text.depth = depth + (1 if serial else 0)
        for sink in pass_.sinks:
            if isinstance(sink, Accumulate):
                name = self.end(sink, columns, here, masks, rows)
                reads = [op for op in later if op.buffer == sink.buffer]
                # Where a guard of a load fails its value is not used: a register serves as well.
                own = self.buffer(sink.buffer)
                is_number = own.level is Level.TILE and own.size == 1
                if is_number or (not serial and all(op.index == sink.index for op in reads)):
                    values[sink.buffer], types[sink.buffer] = name, self.buffer(sink.buffer).dtype
        text.depth = depth

    def split_columns(self, c: str, points: Sequence[Axis], memo: dict[str, str] | None) -> dict[str, Coordinate]:
        """Write the coordinates of a pass' own axes; equal ones of straight passes once."""
        key = f"split {c} " + " ".join(str(a.extent) for a in points)
        if memo is None or len(points) < 2:
            return self.text.split(c, [(a.name, a.extent) for a in points], COLUMNS)
        if key not in memo:
            found = self.text.split(c, [(a.name, a.extent) for a in points], COLUMNS)
            memo[key] = " ".join(found[a.name].text for a in points)
        names = memo[key].split()
        return {a.name: Coordinate(n, COLUMNS) for a, n in zip(points, names, strict=True)}

    def begin(self, sink: Accumulate, rows: int, columns: int) -> str:
        """Write an accumulator."""
        dtype = self.buffer(sink.buffer).dtype
        name = self.accumulator(sink)
        kind = "tl.int32" if dtype is DType.BOOL else COMPUTE[dtype]
        start = literal(identity(sink.op, dtype))
        self.text.line(f"{name} = tl.full([{rows}, {columns}], {start}, {kind})")
        return name

    def accumulator(self, sink: Accumulate) -> str:
        """Return the name of a sink's accumulator."""
        return f"a_{sink.buffer}"

    def collect(self, sink: Accumulate, name: str, value: str, masks: dict[int, str]) -> None:
        """Write what adds a value to an accumulator."""
        dtype = self.buffer(sink.buffer).dtype
        if dtype is DType.BOOL:
            value = f"{value}.to(tl.int32)"
        if 1 in masks:
            start = literal(identity(sink.op, dtype))
            value = f"tl.where({masks[1]}, {value}, {start})"
        self.text.line(f"{name} = {_COMBINE[sink.op].format(name, value)}")

    def reduced(self, sink: Accumulate, columns: int) -> str:
        """Return what an accumulator comes to, [rows, 1]."""
        name = self.accumulator(sink)
        if columns == 1:
            return name
        if sink.op == "sum":
            return f"tl.sum({name}, 1)[:, None]"
        return f"tl.reduce({name}, 1, {_FUNCTION[sink.op]})[:, None]"

    def end(self, sink: Accumulate, columns: int, at: dict[str, Coordinate], masks: dict[int, str], rows: int) -> str:
        """Write what an accumulator comes to, into memory unless a register does; return it."""
        buffer, text = self.buffer(sink.buffer), self.text
        total = self.reduced(sink, columns)
        if buffer.dtype is DType.BOOL:
            total = f"({total} != 0)"
        name = text.fresh("t")
        text.line(f"{name} = {self.narrowed(total, buffer.dtype)}")
        if buffer.level is not Level.TILE or buffer.size > 1:
            text.store(buffer.name, buffer.dtype, sink.index, name, at, masks, f"[{rows}, 1]")
        return name

    def narrowed(self, value: str, dtype: DType) -> str:
        """Return an integer with the bits of its type; floats keep their excess."""
        if dtype.is_float or dtype is DType.BOOL or COMPUTE[dtype] == STORED[dtype]:
            return value
        return f"{value}.to({STORED[dtype]}).to({COMPUTE[dtype]})"


def _columns_of(pass_: Pass) -> list[Axis]:
    """Return the axes that are columns: the reduced ones, or all of a pass that stores."""
    return [axis for axis in pass_.axes if axis.is_reduced or not pass_.is_reduction]


class _SplitStage(_RowStage):
    """Each pass is a launch over parts of the rows; numbers go through memory."""

    def print(self) -> None:
        stage = self.stage
        grid = self.grid()
        ready: list[tuple[Accumulate, int]] = []  # results of earlier passes, and their parts
        for pass_ in stage.passes:
            points = _columns_of(pass_)
            total = math.prod(a.extent for a in points)
            columns = min(1024, power_of_two(total))
            blocks = -(-total // columns)
            wanted = max(1, -(-4 * self.processors // stage.tasks))
            parts = max(1, min(PARTS, blocks, wanted))
            per_part = -(-blocks // parts)
            parts = -(-blocks // per_part)
            self.program_id()
            text = self.text
            text.line(f"r = (pid // {parts}) + tl.zeros([1, 1], tl.int32)")
            text.line(f"part = pid % {parts}")
            at = text.split("r", [(a.name, a.extent) for a in grid], ROWS)
            values, types = self.totals(ready)
            accumulators = {}
            for sink in pass_.sinks:
                if isinstance(sink, Accumulate):
                    accumulators[sink.buffer] = self.begin(sink, 1, columns)
            text.line(f"for b in range({per_part}):")
            text.depth += 1
            text.line(f"c = (part * {per_part} + b) * {columns} + tl.arange(0, {columns})[None, :]")
            masks = {1: f"(c < {total})"} if total % (columns * per_part * parts) else {}
            here = at | text.split("c", [(a.name, a.extent) for a in points], COLUMNS)
            text.ops(pass_.ops, here, masks, values, types)
            for sink in pass_.sinks:
                if isinstance(sink, Accumulate):
                    self.collect(sink, accumulators[sink.buffer], values[sink.value], masks)
                else:
                    text.store(
                        sink.buffer,
                        self.buffer(sink.buffer).dtype,
                        sink.index,
                        values[sink.value],
                        here,
                        masks,
                        f"[1, {columns}]",
                    )
            text.depth -= 1
            for sink in pass_.sinks:
                if isinstance(sink, Accumulate):
                    dtype = self.buffer(sink.buffer).dtype
                    name = f"s{len(self.found.scratch)}"
                    self.found.scratch[name] = (dtype, stage.tasks * parts)
                    whole = self.reduced(sink, columns)
                    text.line(f"tl.store({text.pointer(name)} + (r * {parts} + part), {whole}.to({STORED[dtype]}))")
                    ready.append((replace(sink, value=name), parts))
            self.finish(stage.tasks * parts, _warps(columns))
        self.last([(s, p) for s, p in ready if self.buffer(s.buffer).level is not Level.TILE], grid)

    def totals(self, ready: Sequence[tuple[Accumulate, int]]) -> tuple[dict[str, str], dict[str, DType]]:
        """Write what adds up the parts of results."""
        values: dict[str, str] = {}
        types: dict[str, DType] = {}
        text = self.text
        for sink, parts in ready:
            dtype = self.buffer(sink.buffer).dtype
            width, name = power_of_two(parts), text.fresh("t")
            start = literal(identity(sink.op, dtype))
            text.line(f"{name}_at = tl.arange(0, {width})[None, :]")
            text.line(
                f"{name}_parts = tl.load({text.pointer(sink.value)} + (r * {parts} + {name}_at), "
                f"mask={name}_at < {parts}, other={start})"
            )
            kind = "tl.int32" if dtype is DType.BOOL else COMPUTE[dtype]
            text.line(f"{name} = tl.reduce({name}_parts.to({kind}), 1, {_FUNCTION[sink.op]})[:, None]")
            if dtype is DType.BOOL:
                text.line(f"{name} = {name} != 0")
            values[sink.buffer], types[sink.buffer] = name, dtype
        return values, types

    def last(self, ready: Sequence[tuple[Accumulate, int]], grid: Sequence[Axis]) -> None:
        """Print the launch that puts together the results that are outputs."""
        if not ready:
            return
        self.program_id()
        text = self.text
        text.line("r = pid + tl.zeros([1, 1], tl.int32)")
        at = text.split("r", [(a.name, a.extent) for a in grid], ROWS)
        values, _ = self.totals(ready)
        for sink, _ in ready:
            text.store(sink.buffer, self.buffer(sink.buffer).dtype, sink.index, values[sink.buffer], at, {}, "[1, 1]")
        self.finish(self.stage.tasks, 1)
