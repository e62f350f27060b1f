"""A target with matrix units for tests; if the machine has no matrix units, software emulates them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from korch.measure.compiler import Builder
from korch.measure.toolchain import ISA_COMPILER_FLAGS
from korch.target import Target


def matrix_units(target: Target, folder: Path, l2_bytes: int = 256 << 10) -> tuple[Target, Builder]:
    """Return a target with small caches, for which plans have many blocks, chunks and groups; and its compiler."""
    with mock.patch.dict(ISA_COMPILER_FLAGS, {"amx": ISA_COMPILER_FLAGS[target.isa]}):
        builder = Builder("amx", folder)
    if is_software(builder):  # without -O3, because compiling takes longer than running
        builder.flags = tuple("-O1" if flag == "-O3" else flag for flag in builder.flags)
    return Target(isa="amx", lanes=16, threads=2, l2_bytes=l2_bytes), builder


def is_software(builder: Builder) -> bool:
    """Return whether software emulates the matrix units."""
    return "-DKORCH_AMX_IN_SOFTWARE" in builder.flags
