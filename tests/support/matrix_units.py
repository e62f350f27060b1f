"""A target with matrix units for tests; if the machine has no matrix units, software emulates them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from korch.measure.compiler import Builder, CompileFailure
from korch.measure.toolchain import ISA_COMPILER_FLAGS
from korch.system.deadline import Deadline
from korch.target import Target
from korch.tile.llvm.tiles import UNITS

EMULATION = Path(__file__).with_name("amx_emulation.cpp").read_text("utf-8")
TILE_CALL = re.compile(r"@llvm\.x86\.(ldtilecfg|tile\w+|tdp\w+)")


class EmulatedUnits(Builder):
    """Compiles kernels in LLVM IR with calls of an emulation in place of instructions for tile registers."""

    def compile(
        self, sources: Sequence[str], deadline: Deadline | None = None, tell: Callable[[int], None] = lambda done: None
    ) -> list[Path | CompileFailure | None]:
        """Compile texts to objects."""
        return super().compile([emulated(source) for source in sources], deadline, tell)


def emulated(source: str) -> str:
    """Return a source that calls the emulation, or the emulation for the source that asks the system for units."""
    return EMULATION if source == UNITS else TILE_CALL.sub(r"@emulated_\1", source)


def matrix_units(target: Target, folder: Path, l2_bytes: int = 256 << 10) -> tuple[Target, Builder]:
    """Return a target with small caches, for which plans have many blocks, chunks and groups; and its compiler."""
    with mock.patch.dict(ISA_COMPILER_FLAGS, {"amx": ISA_COMPILER_FLAGS[target.isa]}):
        builder = Builder("amx", folder)
        if is_software(builder):
            builder = EmulatedUnits("amx", folder)
    if is_software(builder):  # without -O3, because compiling takes longer than running
        builder.flags = tuple("-O1" if flag == "-O3" else flag for flag in builder.flags)
    return Target(isa="amx", lanes=16, threads=2, l2_bytes=l2_bytes), builder


def is_software(builder: Builder) -> bool:
    """Return whether software emulates the matrix units."""
    return "-DKORCH_AMX_IN_SOFTWARE" in builder.flags
