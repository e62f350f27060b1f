"""The C++ compiler of this machine, and its flags."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from korch.errors import CompileError
from korch.system.extras import install_command

FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fwrapv",
    "-fno-exceptions",
    "-fno-asynchronous-unwind-tables",
    "-Wno-psabi",
    "-w",
)
"""-ffinite-math-only must not be used: attention masks use -inf, and NaN must be propagated. Integers wrap, as in
NumPy: without -fwrapv a compiler assumes that x < x + 1 is true."""

GCC_FLAGS = ("-fno-tree-loop-if-convert", "-fno-gnu-unique", "-fno-predictive-commoning")
"""-fno-tree-loop-if-convert: GCC 12 vectorizes loops of guarded loads incorrectly (tests/native has the case); Clang
does not. -fno-gnu-unique: a library with symbols that are unique in the process is never unloaded.
-fno-predictive-commoning: if windows overlap, it keeps values for reuse in more registers than there are; 9 x 9
windows of 3 channels took 1.9 times as long."""

_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512cd",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mbmi",
    "-mbmi2",
    "-mprefer-vector-width=512",
)
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
ISA_COMPILER_FLAGS = {
    "amx": _AVX512_VNNI,  # the matrix units are used through assembly
    "avx512_bf16": (*_AVX512_VNNI, "-mavx512bf16"),
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"),
    "neon": (),
    "generic": (),
}


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: the command line that calls it.
        version: the first line that it prints for --version.
    """

    command: tuple[str, ...]
    version: str

    @property
    def identity(self) -> str:
        """The version and further arguments: they distinguish its code and timings from another compiler's."""
        return " ".join((self.version, *self.command[1:]))


@cache
def find_compiler() -> Compiler:
    """Return the compiler in `$CXX`, or else g++, clang++, or the compiler in the package `ziglang`.

    Raises:
        CompileError: no compiler works.
    """
    named = os.environ.get("CXX", "").strip()
    if named:
        program, *arguments = shlex.split(named)
        compiler = _try((str(Path(program).absolute()) if "/" in program else program, *arguments))
        if compiler is None:
            raise CompileError(f"{named!r} does not run", where="environment variable CXX", expected="a C++ compiler")
        return compiler
    for name in ("g++", "clang++"):
        path = shutil.which(name)
        compiler = _try((path,)) if path else None
        if compiler is not None:
            return compiler
    if importlib.util.find_spec("ziglang") is not None:
        compiler = _try((sys.executable, "-m", "ziglang", "c++"))
        if compiler is not None:
            return compiler
    raise CompileError(
        "there is no C++ compiler on this machine",
        expected="g++ or clang++, or one in $CXX",
        hint="Install g++ with the system's package manager, or run: " + install_command("compiler"),
    )


def own_flags(version: str, isa: str) -> tuple[str, ...]:
    """Return the flags for one compiler; Clang 18 to 21 needs a separate flag for vectors of 512 bits."""
    if "clang" not in version.lower():
        return GCC_FLAGS
    number = re.search(r"clang version (\d+)", version)
    is_apart = number is not None and 18 <= int(number[1]) <= 21
    return ("-mevex512",) if is_apart and isa in ("amx", "avx512_bf16", "avx512_vnni", "avx512") else ()


def _try(command: tuple[str, ...]) -> Compiler | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    version = done.stdout.splitlines()[0] if done.stdout else command[0]
    return Compiler(command, version)
