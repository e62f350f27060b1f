"""Tile program -> C++.

One function per kernel; a parallel region around all stages, a worksharing loop per stage. A pass
is a loop nest around a generic lambda of the vector width, so that the same text serves whole
vectors and what is left. Where a pad or a concatenation turns inside of the vector axis, the loop
is split there, and each part reads straight from memory. Where loads lie side by side along another
axis than stores, squares of both are read whole and transposed in registers.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from typing import NamedTuple

from korch.tile.cpp_steps import StepPrinter, is_large_tile, require_contractions, tile_bytes, tiles_of
from korch.tile.cpp_text import C_TYPE, NARROW_TYPE, Writer
from korch.tile.loops import SQUARE_TYPES
from korch.tile.memory import places_in_memory
from korch.tile.program import Buffer, Level, Stage, TileProgram, read_by, written_by

SERIAL_POINTS = 6000
"""Programs with fewer points run in the calling thread: a parallel region would cost more."""


class Printed(NamedTuple):
    """A kernel's source.

    Attributes:
        symbol: the name that it exports.
        source: the text.
        workspace_bytes: scratch memory that it needs.
        is_parallel: whether it has a parallel region; else it runs in the calling thread.
    """

    symbol: str
    source: str
    workspace_bytes: int
    is_parallel: bool


def print_cpp(program: TileProgram, comment: str, lanes: int, threads: int, stream_bytes: int = sys.maxsize) -> Printed:
    """Return the source of a program.

    Args:
        program: the program.
        comment: text that stands at the head of the source.
        lanes: float32 elements in a vector register.
        threads: how many run it; one needs no parallel region.
        stream_bytes: outputs of at least this size bypass the caches, and inputs of at least this
            size are prefetched from memory.

    Raises:
        InvalidGraphError: the program has parameters, or layouts or contractions that are not printed.
    """
    require_contractions(program)
    return _Printer(program, comment, lanes, threads, stream_bytes).run()


class _Printer:
    def __init__(self, program: TileProgram, comment: str, lanes: int, threads: int, stream_bytes: int) -> None:
        self.program = program
        self.comment = comment
        self.is_parallel = threads > 1 and program.work >= SERIAL_POINTS
        self.threads = threads if self.is_parallel else 1
        self.room_bytes = max((sum(map(tile_bytes, self._large_tiles(s))) for s in program.stages), default=0)
        streamed, large = _streamed(program, stream_bytes), _large(program, stream_bytes)
        self.out = Writer(program, lanes, streamed, large)

    def run(self) -> Printed:
        if self.is_parallel:
            limit = f" num_threads({self.threads})" if self.room_bytes else ""  # as many as have room
            self.out.open(f"#pragma omp parallel{limit}")
        workspace_bytes = self._pointers()  # of each thread, or every use would read them again
        for stage, waits in zip(self.program.stages, self._waits(), strict=True):
            self._stage(stage, waits)
        if self.is_parallel:
            self.out.close()
        head = "".join(f"// {line}\n" for line in self.comment.splitlines())
        tables = "".join(
            f"static const int32_t NAME_{name}[] = {{{', '.join(map(str, table))}}};\n"
            for table, name in self.out.tables.items()
        )
        body = "\n".join(self.out.lines)
        is_narrow = any(type_ in body for type_ in NARROW_TYPE.values())
        header = "korch_half.h" if is_narrow else "korch_tile.h"
        header = "korch_contract.h" if "korch::Contraction<" in body else header
        header = "korch_contract_int.h" if re.search("korch::(Byte|Pair)Contraction<", body) else header
        header = "korch_contract_lanes.h" if "korch::LaneContraction<" in body else header
        header = "korch_contract_window.h" if "korch::WindowContraction<" in body else header
        text = (
            f'{head}#include "{header}"\n\n{tables}'
            'extern "C" int NAME_run(void*, void* const* buffers) {\n'
            f"{body}\n  return 0;\n}}\n"
        )
        symbol = "k_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        return Printed(symbol, text.replace("NAME", symbol), workspace_bytes, self.is_parallel)

    # Structure

    def _pointers(self) -> int:
        places, offset = places_in_memory(self.program)
        for buffer in self.program.buffers:
            if buffer.name not in places:
                continue
            type_, place = C_TYPE[buffer.dtype], places[buffer.name]
            if buffer.level is Level.WORKSPACE:
                text = f"static_cast<char*>(buffers[{place.position}]) + {place.offset_bytes}"
                self.out.line(f"{type_}* const {buffer.name} = reinterpret_cast<{type_}*>({text});")
                continue
            type_ = NARROW_TYPE.get(buffer.dtype, type_)
            const = "const " if buffer.level is Level.INPUT else ""
            text = f"static_cast<{const}{type_}*>(buffers[{place.position}])"
            self.out.line(f"{const}{type_}* const __restrict {buffer.name} = {text};")
        if not self.room_bytes:
            return offset
        ports = sum(buffer.level in (Level.INPUT, Level.OUTPUT) for buffer in self.program.buffers)
        me = "omp_get_thread_num()" if self.is_parallel else "0"
        self.out.line(
            f"char* const room = static_cast<char*>(buffers[{ports}]) + {offset} + {self.room_bytes}L * {me};"
        )
        return offset + self.room_bytes * self.threads

    def _large_tiles(self, stage: Stage) -> list[Buffer]:
        """Return the tiles of a stage that are in the workspace."""
        return [buffer for buffer in tiles_of(self.program, stage) if is_large_tile(stage, buffer)]

    def _waits(self) -> list[bool]:
        """Return after which stages threads wait for each other: before one that reads a result.

        Behind the last they meet at the end of the parallel region.
        """
        waits: list[bool] = []
        written: set[str] = set()
        for stage, following in itertools.zip_longest(self.program.stages, self.program.stages[1:]):
            written |= written_by(stage.steps)
            read = read_by(following.steps) if following is not None else set()
            waits.append(bool(written & read))
            written = set() if waits[-1] else written
        return waits

    def _stage(self, stage: Stage, waits: bool) -> None:
        given = {b.name for b in self.program.buffers if b.level is Level.INPUT}
        steps = StepPrinter(self.out, stage, given)
        is_streamed = steps.is_streamed
        if self.is_parallel:
            nowait = "" if waits and not is_streamed else " nowait"
            self.out.line(f"#pragma omp for schedule(static){nowait}")
        self.out.open(f"for (long task = 0; task < {stage.tasks}; ++task)")
        rest, left = "task", stage.tasks
        for axis in stage.grid:
            left //= axis.extent
            value = rest if left == 1 else f"{rest} / {left}"
            self.out.line(f"[[maybe_unused]] const long {axis.name} = {value};")
            rest = f"task % {left}" if left > 1 else "0"
        large, offset = self._large_tiles(stage), 0
        for buffer in tiles_of(self.program, stage):
            type_ = C_TYPE[buffer.dtype]
            if buffer in large:
                self.out.line(f"{type_}* const {buffer.name} = reinterpret_cast<{type_}*>(room + {offset});")
                offset += tile_bytes(buffer)
            else:
                self.out.line(f"alignas(64) {type_} {buffer.name}_array[{max(buffer.size, 1)}];")
                self.out.line(f"{type_}* const {buffer.name} = {buffer.name}_array;  // functions copy the pointer")
        steps.run()
        self.out.close()
        if is_streamed:
            self.out.line("korch::end_streams();")
            if self.is_parallel and waits:
                self.out.line("#pragma omp barrier")


def _streamed(program: TileProgram, stream_bytes: int) -> frozenset[str]:
    """Return the outputs that are written past the caches: large ones, not read here again.

    Lines that are written whole are then not read first, and nothing else leaves a cache for them.
    """
    read = read_by(tuple(step for stage in program.stages for step in stage.steps))
    return frozenset(
        buffer.name
        for buffer in program.buffers
        if buffer.level is Level.OUTPUT
        and buffer.dtype in SQUARE_TYPES
        and buffer.size * buffer.dtype.size_bytes >= stream_bytes
        and buffer.name not in read
    )


def _large(program: TileProgram, large_bytes: int) -> frozenset[str]:
    """Return the inputs that no core's own cache holds."""
    return frozenset(
        buffer.name
        for buffer in program.buffers
        if buffer.level is Level.INPUT and buffer.size * buffer.dtype.size_bytes >= large_bytes
    )
