"""A target with matrix units for tests; if the machine has no matrix units, software emulates them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from korch.measure.compiler import Builder, CompileFailure
from korch.measure.toolchain import ISA_COMPILER_FLAGS
from korch.provider.provider import Kernel
from korch.system.deadline import Deadline
from korch.target import Target, has_matrix_units
from korch.tile.llvm.tiles import UNITS

EMULATION = Path(__file__).with_name("amx_emulation.cpp").read_text("utf-8")
NOT_READY = EMULATION.replace("int korch_matrix_units() { return 1; }", "int korch_matrix_units() { return 0; }")
"""Tells kernels that the system does not give them the units."""

TILE_CALL = re.compile(r"@llvm\.x86\.(ldtilecfg|tile\w+|tdp\w+)")


def denied(kernel: Kernel) -> Kernel:
    """Return a kernel to which the system does not give the units."""
    assert UNITS in kernel.units
    return replace(kernel, units=tuple(NOT_READY if unit == UNITS else unit for unit in kernel.units))


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
        builder = (Builder if has_matrix_units() else EmulatedUnits)("amx", folder)
    return Target(isa="amx", lanes=16, threads=2, l2_bytes=l2_bytes), builder


def is_software(builder: Builder) -> bool:
    """Return whether software emulates the matrix units."""
    return isinstance(builder, EmulatedUnits)
