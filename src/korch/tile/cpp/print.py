"""Prints a tile program as C++.

A kernel is one function. If threads share its work, each stage is also a function, which runs a range of the stage's
tasks. Each thread calls the kernel's function `NAME_team`, which calls the stage functions; a plan may instead run
chosen tasks of a stage through `NAME_task`. A pass is a loop nest around a lambda that is generic in the vector width,
so that the same text handles whole vectors and the remaining elements. If the source of a pad or a concatenation
changes inside the vector axis, the loop is split there, and each part reads directly from memory. If loads are
contiguous along another axis than stores, square blocks are read as whole vectors and transposed in registers.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from korch.ranges.live import Count
from korch.system.content_name import content_name
from korch.tile.analysis.components import split_of
from korch.tile.analysis.shares import PLACE, Shares, by_rows, shares_of
from korch.tile.analysis.stages import (
    SERIAL_POINTS,
    is_large_tile,
    large_inputs,
    stages_that_wait,
    streamed_outputs,
    tiles_of,
)
from korch.tile.cpp.accepts import require_contractions
from korch.tile.cpp.sort import print_sort
from korch.tile.cpp.steps import StepPrinter, bytes_of_tile
from korch.tile.cpp.text import C_TYPE, NARROW_TYPE, CppWriter
from korch.tile.ir.index import Expr
from korch.tile.ir.parameters import PART, whole
from korch.tile.ir.program import Axis, Buffer, Contract, Level, Parameter, Product, Stage, TileProgram
from korch.tile.lower.buffers import places_in_memory

ROWS_BEHIND = 64
"""Kernels that compute rows in blocks may look up this many entries of the row table beyond the last row."""

HEADERS = (
    (r"korch::Contraction<", "korch_contract.h"),
    (r"korch::WindowContraction<", "korch_contract_window.h"),
    (r"korch::DenseContraction<", "korch_contract_dense.h"),
    (r"korch_amx::Product{", "korch_contract_split.h"),
    (r"korch_amx::Chained\{", "korch_contract_chain.h"),
    (r"korch_amx::Window<", "korch_contract_image.h"),
    (r"korch::(sort_rows|top)<", "korch_sort.h"),
)
"""Patterns in a kernel's text, each with the header of `native/` that it needs."""


class PrintedCpp(NamedTuple):
    """A kernel's source.

    Attributes:
        symbol: the name that it exports.
        source: the text.
        workspace_bytes: the size of the scratch memory that it needs.
        thread_bytes: the private part of it per thread, if threads share no part of it; else 0.
        is_parallel: whether it has a parallel region; else it runs in the calling thread.
    """

    symbol: str
    source: str
    workspace_bytes: int
    thread_bytes: int
    is_parallel: bool


def print_cpp(
    program: TileProgram,
    comment: str,
    lanes: int,
    threads: int,
    stream_bytes: int = sys.maxsize,
    counts: Mapping[str, Count] | None = None,
) -> PrintedCpp:
    """Return the source of a program.

    Args:
        program: the program. Its parameters must be in `counts`.
        comment: the comment at the head of the source.
        lanes: float32 elements in a vector register.
        threads: the number of threads that run it; one thread needs no parallel region.
        stream_bytes: outputs of at least this size bypass the caches, and inputs of at least this
            size are prefetched from memory.
        counts: how parameters follow from the sizes, 64-bit integers in the kernel's last buffer.

    Raises:
        InvalidGraphError: the program has other parameters, or layouts or contractions that are not printed.
    """
    require_contractions(program, counts or {})
    return _Printer(program, comment, lanes, threads, stream_bytes, counts or {}).run()


class _Printer:
    def __init__(
        self,
        program: TileProgram,
        comment: str,
        lanes: int,
        threads: int,
        stream_bytes: int,
        counts: Mapping[str, Count],
    ) -> None:
        self.parameters, self.counts = program.parameters, counts
        self.part = next((p for p in program.parameters if p.name == PART), None)
        self.grids = [stage.grid for stage in program.stages]
        ranges = program.parameter_ranges
        self.shares = [shares_of(stage, ranges) for stage in program.stages]
        self.program = program = whole(program)
        self.comment = comment
        self.is_parallel = threads > 1 and sum(stage.work for stage in program.stages) >= SERIAL_POINTS
        self.threads = threads if self.is_parallel else 1
        self.room_bytes = max(map(self._large_bytes, program.stages), default=0)
        streamed, large = streamed_outputs(program, stream_bytes), large_inputs(program, stream_bytes)
        self.out = CppWriter(program, lanes, streamed, large, depth=0 if self.is_parallel else 1)

    def run(self) -> PrintedCpp:
        if self.is_parallel:
            for i, stage in enumerate(self.program.stages):
                self._stage_function(i, stage)
        else:
            self._pointers()
            for i, stage in enumerate(self.program.stages):
                shares = self.shares[i] if self.part is not None else None
                self._tasks(i, stage, "0", self._count(i) if shares is None else shares.parameter)
        head = "".join(f"// {line}\n" for line in self.comment.splitlines())
        tables = "".join(
            f"static const int32_t NAME_{name}[] = {{{', '.join(map(str, table))}}};\n"
            for table, name in self.out.tables.items()
        )
        body = "\n".join(self.out.lines)
        headers = [*_headers(body), *(["korch_team.h"] if self.is_parallel else [])]
        includes = "".join(f'#include "{header}"\n' for header in headers)
        text = f"{head}{includes}\n{tables}{self._functions(body)}"
        symbol = content_name("k", text)
        shared_bytes = places_in_memory(self.program)[1]
        workspace_bytes = shared_bytes + self.room_bytes * self.threads
        own_bytes = self.room_bytes if not shared_bytes else 0
        thread_bytes = own_bytes if self.is_parallel else workspace_bytes
        source = text.replace("NAME", symbol)
        return PrintedCpp(symbol, source, workspace_bytes, thread_bytes, self.is_parallel)

    # Structure

    def _functions(self, body: str) -> str:
        """Return the functions that the kernel exports, with those of the stages."""
        head = 'extern "C" int NAME_run(void*, void* const* buffers) {'
        if not self.is_parallel:
            return f"{head}\n{body}\n  return 0;\n}}\n"
        calls, cases = [], []
        for i, waits in enumerate(stages_that_wait(self.program)):
            begin, end = (self._share(i, me) for me in ("me", "me + 1"))
            calls.append(f"  NAME_stage{i}(buffers, {begin}, {end}, me);\n")
            calls += ["  own.meet();\n"] if waits else []
            cases.append(f"    case {i}: return NAME_stage{i}(buffers, begin, end, me);\n")
        most = str(self.threads) if self.room_bytes else "omp_get_max_threads()"
        size = "".join(f"  [[maybe_unused]] {line}\n" for line in self._live())
        threads = f"korch::smaller({self.threads}, own.threads)" if self.room_bytes else "own.threads"
        parameters = "int stage, void* const* buffers, long begin, long end, long me"
        return (
            f'{body}\n\nextern "C" int NAME_team(void* const* buffers, korch::Member& own) {{\n{size}'
            f"  const long me = own.me, threads = {threads};\n{''.join(calls)}  return 0;\n}}\n\n"
            f"{head}\n  return korch::run_region({most}, NAME_team, buffers);\n}}\n\n"
            f'extern "C" void NAME_task({parameters}) {{\n'
            f"  switch (stage) {{\n{''.join(cases)}  }}\n}}\n"
        )

    def _stage_function(self, i: int, stage: Stage) -> None:
        """Print the function in which a thread runs a range of a stage's tasks."""
        parameters = "void* const* buffers, long begin, long end, [[maybe_unused]] long me"
        self.out.open(f"static KORCH_ALONE void NAME_stage{i}({parameters})")
        self._pointers()
        self._tasks(i, stage, "begin", "end")
        self.out.close()

    def _live(self) -> list[str]:
        """Return the lines that compute the parameters of a program from the sizes."""
        ports = sum(buffer.level in (Level.INPUT, Level.OUTPUT) for buffer in self.program.buffers)
        has_workspace = places_in_memory(self.program)[1] + self.room_bytes > 0
        sizes = f"static_cast<const int64_t*>(buffers[{ports + has_workspace}])"
        counts = ((p, count_text(self.counts[p.name], sizes)) for p in self.parameters)
        return [f"const long {p.name} = korch::smaller({p.high}, {count});" for p, count in counts]

    def _share(self, i: int, me: str) -> str:
        """Return the text of the beginning of a thread's range of a stage; `me` is the text of the thread's number."""
        shares = self.shares[i]
        if shares is None:
            return f"korch::share({self._count(i)}, {me}, threads)"
        return f"korch::share_units({shares.parameter}, {shares.unit}, {me}, threads)"

    def _count(self, i: int) -> str:
        """Return the number of tasks of a stage, as text."""
        return self._product(self.grids[i])

    def _product(self, axes: Sequence[Axis]) -> str:
        known = math.prod(axis.size for axis in axes if isinstance(axis.size, int))
        others = [f"({self.out.expr(axis.size)})" for axis in axes if isinstance(axis.size, Expr)]
        return " * ".join([*([str(known)] if known != 1 or not others else []), *others])

    def _pointers(self) -> None:
        """Print a pointer to each buffer, and to the thread's private workspace (`room`)."""
        places, offset = places_in_memory(self.program)
        for line in self._live():
            self.out.line(f"[[maybe_unused]] {line}")
        for buffer in self.program.buffers:
            if buffer.name not in places:
                continue
            type_, place = C_TYPE[buffer.dtype], places[buffer.name]
            if buffer.level is Level.WORKSPACE:
                text = f"static_cast<char*>(buffers[{place.position}]) + {place.offset_bytes}"
                text = f"{type_}* const {buffer.name} = reinterpret_cast<{type_}*>({text});"
            else:
                type_ = NARROW_TYPE.get(buffer.dtype, type_)
                const = "const " if buffer.level is Level.INPUT else ""
                text = f"static_cast<{const}{type_}*>(buffers[{place.position}])"
                text = f"{const}{type_}* const __restrict {buffer.name} = {text};"
            self.out.line(f"[[maybe_unused]] {text}" if self.is_parallel else text)
        if self.room_bytes:
            ports = sum(buffer.level in (Level.INPUT, Level.OUTPUT) for buffer in self.program.buffers)
            me = f" + {self.room_bytes} * me" if self.is_parallel else ""
            text = f"static_cast<char*>(buffers[{ports}]) + {offset}{me};"
            self.out.line(f"[[maybe_unused]] char* const room = {text}")

    def _large_tiles(self, stage: Stage) -> list[Buffer]:
        """Return the tiles of a stage that are in the workspace."""
        return [
            buffer
            for buffer in tiles_of(self.program, stage)
            if is_large_tile(stage, bytes_of_tile(self.program, stage, buffer))
        ]

    def _large_bytes(self, stage: Stage) -> int:
        return sum(bytes_of_tile(self.program, stage, buffer) for buffer in self._large_tiles(stage))

    def _tasks(self, i: int, stage: Stage, begin: str, end: str) -> None:
        """Print the loop over a range of a stage's tasks."""
        given = {b.name for b in self.program.buffers if b.level is Level.INPUT}
        shares = self.shares[i] if self.is_parallel or self.part is not None else None
        if shares is not None and self.part is not None:
            stage = by_rows(stage, shares) or stage
        steps = StepPrinter(self.out, stage, given)
        if any(isinstance(step, Contract) and step.product is Product.SPLIT for _, step in stage.leaves):
            self.out.line("const korch_amx::Units units;")
        if shares is None:
            self._loop(i, begin, end)
        else:
            self._moved(stage, shares, begin, end)
        large, offset = self._large_tiles(stage), 0
        for buffer in tiles_of(self.program, stage):
            type_, size = C_TYPE[buffer.dtype], max(buffer.size, 1)
            if split_of(buffer) is not None:
                type_, size = "uint16_t", bytes_of_tile(self.program, stage, buffer) // 2
            if buffer in large:
                self.out.line(f"{type_}* const {buffer.name} = reinterpret_cast<{type_}*>(room + {offset});")
                offset += bytes_of_tile(self.program, stage, buffer)
            else:
                self.out.line(f"alignas(64) {type_} {buffer.name}_array[{size}];")
                self.out.line(f"{type_}* const {buffer.name} = {buffer.name}_array;  // functions copy the pointer")
        if stage.sort is not None:
            self.out.line(print_sort(stage.sort, stage.grid))
        steps.run()
        self.out.close()
        if shares is not None:
            self.out.close()
        if steps.is_streamed:
            self.out.line("korch::end_streams();")

    def _loop(self, i: int, begin: str, end: str) -> None:
        """Open the loop over a range of tasks, and print each task's grid coordinates."""
        self.out.open(f"for (long task = {begin}; task < {end}; ++task)")
        rest, grid = "task", self.grids[i]
        for place, axis in enumerate(grid, 1):
            left = self._product(grid[place:])
            left = f"({left})" if "*" in left else left
            is_last = left == "1"
            value = rest if is_last else f"{rest} / {left}"
            self.out.line(f"[[maybe_unused]] const long {axis.name} = {value};")
            rest = f"task % {left}" if not is_last else "0"

    def _rows(self, shares: Shares, part: Parameter) -> str:
        """Print the table of the positions of a task's rows relative to its first; return the first row's position."""
        size = shares.most + ROWS_BEHIND
        self.out.line(f"const long {PLACE} = first / {part.name} * {part.high} + first % {part.name};")
        self.out.line(f"int32_t row_table[{size}];")
        self.out.line(f"korch::place_rows(row_table, {size}, first % {part.name}, {part.name}, {part.high});")
        self.out.line("const int32_t* const row_at = row_table;  // functions copy the pointer")
        return PLACE

    def _moved(self, stage: Stage, shares: Shares, begin: str, end: str) -> None:
        """Open the loop over a thread's coordinates: each iteration runs as the first task, with advanced pointers."""
        name = shares.parameter
        self.out.open(f"for (long first = {begin}; first < {end}; first += {shares.most})")
        self.out.line(f"const long left = korch::smaller({name}, {end}) - first;")
        place = "first"
        if self.part is not None:
            place = self._rows(shares, self.part)
        for moved, step in shares.steps.items():
            self.out.line(f"auto* const {moved}_at = {moved} + {step} * {place};")
        self.out.open("")
        self.out.line(f"const long {name} = left;")
        for buffer in self.program.buffers:
            if buffer.name in shares.steps:
                restrict = "" if buffer.level is Level.WORKSPACE else " __restrict"
                self.out.line(f"auto* const{restrict} {buffer.name} = {buffer.name}_at;")
        for axis in stage.grid:
            self.out.line(f"[[maybe_unused]] const long {axis.name} = 0;")


def count_text(count: Count, sizes: str) -> str:
    """Return a count as a C++ expression; `sizes` is the text of a pointer to the sizes."""

    def rounded(text: str, step: int) -> str:
        return f"({text} + {step - 1}) / {step} * {step}" if step > 1 else text

    size = f"{sizes}[{count.dimension}]"
    terms = (rounded(f"({e.times} * {size} + {e.plus}) / {e.over}", e.step) for e in count.extents)
    text = rounded(reduce(lambda most, other: f"korch::larger({most}, {other})", terms), count.step)
    text = text if count.times == 1 else f"{count.times} * ({text})"
    if count.rows is None:
        return text
    outer, inner = count.rows
    return f"{count_text(outer, sizes)} * korch::smaller({inner}, {text})"


def _headers(body: str) -> list[str]:
    """Return the files of `native/` that a kernel includes."""
    is_narrow = any(type_ in body for type_ in NARROW_TYPE.values())
    found = [header for pattern, header in HEADERS if re.search(pattern, body)]
    return found or ["korch_half.h" if is_narrow else "korch_tile.h"]
