"""Prints a stage with reductions as launches on tiles whose rows are tasks and whose columns are points of a pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from korch.primitive.ops.reduce import identity
from korch.primitive.types import DType
from korch.tile.ir.index import Expr, add, scale, var
from korch.tile.ir.program import Accumulate, Axis, Level, Load, Pass, written_by
from korch.tile.triton.launch import MANY_NUMBERS, StageLaunch, numbers_of, warps_for
from korch.tile.triton.text import COLUMNS, COMPUTE, REDUCE, ROWS, STORED, Coordinate, literal, power_of_two

MOST_SERIAL = 128
"""Up to this many points, a reduction is a serial loop if corresponding elements of rows are adjacent in memory."""

SHORT = 16
"""An axis of fewer points, among other axes of a window, does not count as contiguous reads."""

LONGEST_ROW = 4096
"""The columns of the widest tile of a reduction."""

PARTS = 256
"""The maximum number of parts of a split row: one tile combines them."""

MANY_ROWS = 128
"""The maximum rows of a tile if each point has many numbers."""

TASK = "task"
"""The variable that holds the number of a task, in indices of tiles that are in memory."""

_COMBINE = {"sum": "{} + {}", "prod": "{} * {}", "max": "f.larger({}, {})", "min": "f.smaller({}, {})"}


@dataclass
class TileRows:
    """The rows of a tile, and the values that later passes can reuse."""

    rows: int  # the number of rows
    at: dict[str, Coordinate]  # the coordinates of the grid's axes
    masks: dict[int, str]  # by axis of the tile, the condition that an element is inside
    values: dict[str, str] = field(default_factory=dict)  # by buffer, the variable that holds its value
    types: dict[str, DType] = field(default_factory=dict)  # by buffer, its type
    memo: dict[str, str] = field(default_factory=dict)  # by text of an expression, the variable that already holds it


class RowStage(StageLaunch):
    """Prints a stage as one launch: rows are tasks, and passes run over columns."""

    def print(self) -> None:
        """Print the stage as one launch."""
        stage, text = self.stage, self.text
        self.spill()
        rows, columns = self.tile()
        self.widen()
        tasks = stage.tasks
        text.line(f"r = pid * {rows} + tl.arange(0, {rows})[:, None]")
        masks = {}
        if tasks % rows:
            text.line(f"r_inside = r < {tasks}")
            masks[0] = "r_inside"
        at = text.split("r", [(a.name, a.extent) for a in self.grid()], ROWS)
        at[TASK] = Coordinate("r", ROWS)
        row = TileRows(rows, at, masks)
        passes = [self.addressed(pass_) for pass_ in stage.passes]
        for number, pass_ in enumerate(passes):
            later = [op for p in passes[number + 1 :] for op in p.ops if isinstance(op, Load)]
            self.pass_(pass_, columns[number], row, later)
            written = {sink.buffer for sink in pass_.sinks} & {op.buffer for op in later}
            if any(name not in row.values for name in written):
                text.line("tl.debug_barrier()")
                row.memo.clear()
        usual = warps_for(rows * max(columns), max(map(numbers_of, passes)))
        self.finish(-(-tasks // rows), self.options.warps if self.options.tile[0] else usual)

    def grid(self) -> list[Axis]:
        """Return the grid's axes, with the one along which most reads are contiguous last."""
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
        """Return the rows of a tile, and its columns for each pass; 1 column means a serial loop."""
        grid = self.grid()
        last = grid[-1].name if grid else ""
        beside = side = 0
        for pass_ in self.stage.passes:
            only = pass_.axes[0] if len(pass_.axes) == 1 else None
            for op in pass_.ops:
                if not isinstance(op, Load):
                    continue
                if last and op.index.coefficient(last) == 1:
                    beside += self.sizes[op.buffer]
                elif any(op.index.coefficient(a.name) == 1 for a in pass_.axes if a.extent >= SHORT or a is only):
                    side += self.sizes[op.buffer]
        extents = [math.prod(a.extent for a in _columns_of(p)) for p in self.stage.passes]
        tasks, longest = self.stage.tasks, max(extents)
        if (rows := self.options.tile[0]) > 0:
            return rows, [min(power_of_two(n), self.options.tile[1]) for n in extents]
        if beside >= side and longest <= MOST_SERIAL:
            most = 256 if max(map(numbers_of, self.stage.passes)) <= MANY_NUMBERS else MANY_ROWS
            rows = min(most, power_of_two(tasks))
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
        """Return a pass in which indices of tiles that are in memory include the offset of the task."""

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
        """Put tiles of more than one element into scratch memory."""
        for buffer in self.program.buffers:
            if buffer.level is Level.TILE and buffer.size > 1 and buffer.name in written_by(self.stage.steps):
                self.found.scratch[buffer.name] = (buffer.dtype, buffer.size * self.stage.tasks)

    def pass_(self, pass_: Pass, columns: int, row: TileRows, later: Sequence[Load]) -> None:
        """Write a pass; `later` are the loads of the following passes."""
        text, depth = self.text, self.text.depth
        serial = [a for a in pass_.axes if pass_.is_reduction and not a.is_reduced]
        here = dict(row.at)
        if serial:
            count = math.prod(a.extent for a in serial)
            k = text.fresh("k")
            text.line(f"for {k} in range({count}):")
            text.depth += 1
            here |= text.split(k, [(a.name, a.extent) for a in serial], frozenset())
        accumulators = [self.begin(sink, row.rows, columns) for sink in pass_.sinks if isinstance(sink, Accumulate)]
        masks = dict(row.masks)
        total = math.prod(a.extent for a in _columns_of(pass_))
        memo = row.memo if total <= columns and not serial and columns > 1 else None
        here |= self.columns(pass_, columns, masks, memo)
        if pass_.where:
            masks[0] = " & ".join([*([masks[0]] if 0 in masks else []), *text.guards(pass_.where, here)])
        inner, inner_types = dict(row.values), dict(row.types)
        text.ops(pass_.ops, here, masks, inner, inner_types, memo)
        shape = f"[{row.rows}, {columns}]"
        for sink in pass_.sinks:
            own = self.buffer(sink.buffer)
            if isinstance(sink, Accumulate):
                self.collect(sink, accumulators.pop(0), inner[sink.value], masks)
            elif own.level is Level.TILE and total == 1:
                row.values[sink.buffer], row.types[sink.buffer] = inner[sink.value], own.dtype
            else:
                text.store(sink, own.dtype, inner[sink.value], here, masks, shape)
        text.depth = depth + (1 if serial else 0)
        for sink in pass_.sinks:
            if isinstance(sink, Accumulate):
                name = self.end(sink, columns, here, row.masks, row.rows)
                reads = [op for op in later if op.buffer == sink.buffer]
                # Where a guard of a load fails, its value is not used, so the variable can replace the load.
                own = self.buffer(sink.buffer)
                is_number = own.level is Level.TILE and own.size == 1
                if is_number or (not serial and all(op.index == sink.index for op in reads)):
                    row.values[sink.buffer], row.types[sink.buffer] = name, own.dtype
        text.depth = depth

    def columns(
        self, pass_: Pass, columns: int, masks: dict[int, str], memo: dict[str, str] | None
    ) -> dict[str, Coordinate]:
        """Write the loop over the columns of a pass; return the coordinates of its own axes.

        Args:
            pass_: the pass.
            columns: the columns of a tile; 1 for a serial loop.
            masks: receives the mask of the columns, if the last tile is not full.
            memo: the expressions written already, if the columns of the pass are one tile; else None.
        """
        text, points = self.text, _columns_of(pass_)
        total = math.prod(a.extent for a in points)
        if total == 1:
            return {a.name: Coordinate("0") for a in points}
        if columns == 1:
            c = text.fresh("c")
            text.line(f"for {c} in {'tl.static_range' if total <= 16 else 'range'}({total}):")
            text.depth += 1
            return text.split(c, [(a.name, a.extent) for a in points], frozenset())
        # Passes with equal columns use equal names, so that they can share loads.
        c = f"c{total}x{columns}" if memo is not None else text.fresh("c")
        base = ""
        if total > columns:
            base = text.fresh("b")
            text.line(f"for {base} in {self.range(f'0, {total}, {columns}')}:")
            text.depth += 1
            base += " + "
        definition = f"{c} = {base}tl.arange(0, {columns})[None, :]"
        if memo is None or definition not in memo:
            text.line(definition)
            if memo is not None:
                memo[definition] = c
        if total % columns:
            masks[1] = f"({c} < {total})"
        return self.split_columns(c, points, memo)

    def range(self, ends: str) -> str:
        """Return the text of a loop's range; Triton loads the next tiles while it adds up one, if options say so."""
        return f"tl.range({ends}, num_stages={self.options.ahead})" if self.options.ahead else f"range({ends})"

    def split_columns(self, c: str, points: Sequence[Axis], memo: dict[str, str] | None) -> dict[str, Coordinate]:
        """Write the coordinates of a pass's own axes; with a memo, equal ones are written only once."""
        key = f"split {c} " + " ".join(str(a.extent) for a in points)
        if memo is None or len(points) < 2:
            return self.text.split(c, [(a.name, a.extent) for a in points], COLUMNS)
        if key not in memo:
            found = self.text.split(c, [(a.name, a.extent) for a in points], COLUMNS)
            memo[key] = " ".join(found[a.name].text for a in points)
        names = memo[key].split()
        return {a.name: Coordinate(n, COLUMNS) for a, n in zip(points, names, strict=True)}

    def begin(self, sink: Accumulate, rows: int, columns: int) -> str:
        """Write the initialization of an accumulator; return its name."""
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
        """Write the statement that adds a value to an accumulator."""
        dtype = self.buffer(sink.buffer).dtype
        if dtype is DType.BOOL:
            value = f"{value}.to(tl.int32)"
        if 1 in masks:
            start = literal(identity(sink.op, dtype))
            value = f"tl.where({masks[1]}, {value}, {start})"
        self.text.line(f"{name} = {_COMBINE[sink.op].format(name, value)}")

    def reduced(self, sink: Accumulate, columns: int) -> str:
        """Return the text of an accumulator reduced along the columns, of shape [rows, 1]."""
        name = self.accumulator(sink)
        if columns == 1:
            return name
        if sink.op == "sum":
            return f"tl.sum({name}, 1)[:, None]"
        return f"tl.reduce({name}, 1, {REDUCE[sink.op]})[:, None]"

    def end(self, sink: Accumulate, columns: int, at: dict[str, Coordinate], masks: dict[int, str], rows: int) -> str:
        """Write the result of an accumulator, and its store unless a variable suffices; return the variable."""
        buffer, text = self.buffer(sink.buffer), self.text
        total = self.reduced(sink, columns)
        if buffer.dtype is DType.BOOL:
            total = f"({total} != 0)"
        name = text.fresh("t")
        text.line(f"{name} = {self.narrowed(total, buffer.dtype)}")
        if buffer.level is not Level.TILE or buffer.size > 1:
            text.store(sink, buffer.dtype, name, at, masks, f"[{rows}, 1]")
        return name

    def narrowed(self, value: str, dtype: DType) -> str:
        """Return a value with integers wrapped to the bits of their type; floats keep their extra precision."""
        if dtype.is_float or dtype is DType.BOOL or COMPUTE[dtype] == STORED[dtype]:
            return value
        return f"{value}.to({STORED[dtype]}).to({COMPUTE[dtype]})"


def _columns_of(pass_: Pass) -> list[Axis]:
    """Return the axes that form the columns: the reduced axes, or all axes of a pass of stores."""
    return [axis for axis in pass_.axes if axis.is_reduced or not pass_.is_reduction]


class SplitStage(RowStage):
    """Prints each pass as a launch over parts of the rows; partial results go through memory."""

    def print(self) -> None:
        """Print a launch for each pass, and one that combines the results."""
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
            self.widen()
            text = self.text
            text.line(f"r = (pid // {parts}) + tl.zeros([1, 1], tl.int32)")
            text.line(f"part = pid % {parts}")
            at = text.split("r", [(a.name, a.extent) for a in grid], ROWS)
            values, types = self.totals(ready)
            accumulators = {}
            for sink in pass_.sinks:
                if isinstance(sink, Accumulate):
                    accumulators[sink.buffer] = self.begin(sink, 1, columns)
            text.line(f"for b in {self.range(str(per_part))}:")
            text.depth += 1
            text.line(f"c = (part * {per_part} + b) * {columns} + tl.arange(0, {columns})[None, :]")
            masks = {1: f"(c < {total})"} if total % (columns * per_part * parts) else {}
            here = at | text.split("c", [(a.name, a.extent) for a in points], COLUMNS)
            text.ops(pass_.ops, here, masks, values, types)
            for sink in pass_.sinks:
                if isinstance(sink, Accumulate):
                    self.collect(sink, accumulators[sink.buffer], values[sink.value], masks)
                else:
                    dtype = self.buffer(sink.buffer).dtype
                    text.store(sink, dtype, values[sink.value], here, masks, f"[1, {columns}]")
            text.depth -= 1
            for sink in pass_.sinks:
                if isinstance(sink, Accumulate):
                    dtype = self.buffer(sink.buffer).dtype
                    name = f"s{len(self.found.scratch)}"
                    self.found.scratch[name] = (dtype, stage.tasks * parts)
                    whole = self.reduced(sink, columns)
                    text.line(f"tl.store({text.pointer(name)} + (r * {parts} + part), {whole}.to({STORED[dtype]}))")
                    ready.append((replace(sink, value=name), parts))
            self.finish(stage.tasks * parts, warps_for(columns))
        self.last([(s, p) for s, p in ready if self.buffer(s.buffer).level is not Level.TILE], grid)

    def totals(self, ready: Sequence[tuple[Accumulate, int]]) -> tuple[dict[str, str], dict[str, DType]]:
        """Write the statements that combine the parts of earlier results; return variables and types by buffer."""
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
            text.line(f"{name} = tl.reduce({name}_parts.to({kind}), 1, {REDUCE[sink.op]})[:, None]")
            if dtype is DType.BOOL:
                text.line(f"{name} = {name} != 0")
            values[sink.buffer], types[sink.buffer] = name, dtype
        return values, types

    def last(self, ready: Sequence[tuple[Accumulate, int]], grid: Sequence[Axis]) -> None:
        """Print the launch that combines the parts of results that are outputs."""
        if not ready:
            return
        self.widen()
        text = self.text
        text.line("r = pid + tl.zeros([1, 1], tl.int32)")
        at = text.split("r", [(a.name, a.extent) for a in grid], ROWS)
        values, _ = self.totals(ready)
        for sink, _ in ready:
            text.store(sink, self.buffer(sink.buffer).dtype, values[sink.buffer], at, {}, "[1, 1]")
        self.finish(self.stage.tasks, 1)
