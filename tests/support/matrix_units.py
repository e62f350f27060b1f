"""A target with matrix units for tests; if the machine has no matrix units, software emulates them."""

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from korch.measure.compiler import Builder
from korch.provider.provider import Kernel
from korch.target import LANES, Target, has_matrix_units
from korch.tile.llvm.isa import ISAS
from korch.tile.llvm.print import MARK
from korch.tile.llvm.tiles import READY
from tests.support.c_code import COMPILER

SOURCE = Path(__file__).with_name("amx_emulation.c")
CALL = r"@llvm\.x86\.(ldtilecfg|tile\w+|tdp\w+)\("

IS_READY = f'{MARK}generic\ntarget triple = "{ISAS["amx"].triple}"\ndefine i32 @{READY}() {{ ret i32 1 }}\n'
NOT_READY = IS_READY.replace("ret i32 1", "ret i32 0")
"""Tells kernels that the system does not give them the units."""


@cache
def emulation() -> ctypes.CDLL:
    """Return the loaded emulation."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "emulation.so")
        # In C: the compiler would build a library for C++ first, which takes a minute.
        command = [*COMPILER, "-std=gnu11", "-O1", "-shared", "-fPIC", "-fno-sanitize=all", str(SOURCE)]
        subprocess.run([*command, "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))


def denied(kernel: Kernel) -> Kernel:
    """Return a kernel to which the system does not give the units."""
    assert f"@{READY}()" in kernel.source
    return replace(kernel, units=(*kernel.units, NOT_READY))


class EmulatedUnits(Builder):
    """Compiles kernels in LLVM IR with calls of an emulation in place of instructions for tile registers."""

    def objects(self, sources: Sequence[str]) -> bytes:
        """Compile texts to objects; unless one of them says otherwise, the units are ready."""
        says = any(f"define i32 @{READY}()" in source for source in sources)
        return super().objects([*map(emulated, sources), *([] if says else [IS_READY])])


def emulated(source: str) -> str:
    """Return a source that calls the emulation, which is loaded in this process."""
    without = re.sub(rf"^declare .*{CALL}.*\n", "", source, flags=re.MULTILINE)
    return re.sub(CALL, lambda found: f"inttoptr (i64 {_address(found[1])} to ptr)(", without)


def _address(name: str) -> int:
    return ctypes.cast(getattr(emulation(), f"emulated_{name}"), ctypes.c_void_p).value or 0


def matrix_units(target: Target, folder: Path, l2_bytes: int = 256 << 10) -> tuple[Target, Builder]:
    """Return a target with small caches, for which plans have many blocks, chunks and groups; and its compiler."""
    if target.lanes != LANES["amx"]:
        pytest.skip("this machine has no vectors of 512 bits")
    builder = (Builder if has_matrix_units() else EmulatedUnits)("amx", folder)
    return Target(isa="amx", lanes=16, threads=2, l2_bytes=l2_bytes), builder


def is_software(builder: Builder) -> bool:
    """Return whether software emulates the matrix units."""
    return isinstance(builder, EmulatedUnits)
