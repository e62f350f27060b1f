"""The CPU target: the properties of the machine that kernels are built for, and their detection."""

import ctypes
import hashlib
import os
import platform
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from korch.errors import OptionError

_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")

REQUIRED_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_vnni"),  # kernels check for matrix units at run time and work without them
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_bf16": ("asimd", "asimddp", "i8mm", "bf16"),
    "neon_dot": ("asimd", "asimddp"),
    "neon": ("asimd",),
    "generic": (),
}
"""The flags of /proc/cpuinfo that built kernels need, by instruction set; the best one comes first."""

ISA_FLAGS = {isa: flags for isa, flags in REQUIRED_FLAGS.items() if flags}
ISA_FLAGS["amx"] += ("amx_tile", "amx_bf16", "amx_int8")
"""The flags of a CPU for which an instruction set is chosen."""

_WIDER = {"amx": 16, "avx512_bf16": 16, "avx512_vnni": 16, "avx512": 16, "avx2": 8}
LANES = dict.fromkeys((*ISA_FLAGS, "generic"), 4) | _WIDER
"""float32 elements in a vector register."""

EDGE = 32
"""The rows and columns that the matrix units compute together, and the terms of a step."""

OF_COMPONENTS = ("amx", "avx512_bf16", "neon_bf16")
"""Instruction sets with instructions that multiply bfloat16."""


@dataclass(frozen=True, slots=True)
class Target:
    """The properties of a CPU that generated code and measurements depend on.

    Attributes:
        cpu: the CPU's model name.
        isa: amx (avx512_vnni with matrix units), avx512_bf16 (avx512_vnni with sums of products of bfloat16),
            avx512_vnni (avx512 with sums of products of bytes), avx512, avx2, neon_bf16 and neon_dot (neon with the
            same two), neon or generic.
        lanes: float32 elements in a vector register.
        threads: threads that an executable uses.
        l1_bytes: size of a core's level-1 data cache.
        l2_bytes: size of a core's level-2 cache.
        l3_bytes: size of the level-3 cache that the cores share.
        compiler: the compiler's name and version.
        libraries: other versions that timings depend on, as "name version".
    """

    cpu: str = "generic"
    isa: str = "avx512"
    lanes: int = 16
    threads: int = 2
    l1_bytes: int = 32 << 10
    l2_bytes: int = 1 << 20
    l3_bytes: int = 32 << 20
    compiler: str = ""
    libraries: tuple[str, ...] = field(default=())

    @property
    def fingerprint(self) -> str:
        """A hash of all fields; measurements of targets with different hashes are stored separately."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def registers(self) -> int:
        """Number of vector registers."""
        return 32 if self.isa.startswith("neon") or self.lanes == 16 else 16

    @property
    def has_dot(self) -> bool:
        """Whether an instruction adds the products of four bytes to each lane."""
        return not {"avx512_vnni", "asimddp"}.isdisjoint(ISA_FLAGS.get(self.isa, ()))

    def sums_components(self, pairs: float) -> bool:
        """Return whether products of numbers split into bfloat16 components are supported.

        Matrix units support any number of components; vectors only numbers that are one component.

        `pairs`: the number of products of components for one product of two numbers.
        """
        return self.isa == "amx" or (self.isa in OF_COMPONENTS and pairs == 1)


def detect_target(
    threads: int, compiler: str, libraries: tuple[str, ...] = (), matrix_units: bool = True, isa: str = ""
) -> Target:
    """Return the target for this machine.

    `matrix_units`: whether matrix units (which multiply bytes, and float32 numbers split into components) and
    instructions that multiply bfloat16 may be used. `isa`: the instruction set; "" for that in `$KORCH_ISA` or, without
    it, the best one of this CPU.

    Raises:
        OptionError: this CPU does not have the instruction set.
    """
    flags, model = _cpuinfo()
    fitting = [isa for isa, need in ISA_FLAGS.items() if flags.issuperset(need)]
    missing = () if matrix_units and has_matrix_units() else ("amx",) if matrix_units else OF_COMPONENTS
    usable = [isa for isa in fitting if isa not in missing]
    best = next(iter(usable), "generic")
    where = "option isa" if isa else "the environment variable KORCH_ISA"
    isa = isa or os.environ.get("KORCH_ISA") or best
    if isa not in (*fitting, "generic"):  # its instructions would crash the process
        raise OptionError(
            f"this CPU has no instruction set {isa!r}",
            where,
            f"one of {', '.join((*fitting, 'generic'))}",
            "Change it, or remove it to use the best",
        )
    if isa in missing:
        isa = best  # without these instructions, kernels would emulate them
    return Target(
        cpu=model,
        isa=isa,
        lanes=LANES[isa],
        threads=threads,
        l1_bytes=_cache_bytes(1, 32 << 10),
        l2_bytes=_cache_bytes(2, 1 << 20),
        l3_bytes=_cache_bytes(3, 8 << 20),
        compiler=compiler,
        libraries=libraries,
    )


@cache
def has_matrix_units() -> bool:
    """Ask the system to let this process use Intel's matrix units (AMX); return whether it does."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, ask_for, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return int(ctypes.CDLL(None).syscall(arch_prctl, ask_for, tile_data)) == 0


def _cpuinfo() -> tuple[frozenset[str], str]:
    flags: frozenset[str] = frozenset()
    model = platform.processor() or platform.machine()
    path = Path("/proc/cpuinfo")
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
        elif name.strip() == "model name":
            model = value.strip()
    return flags, model


def _cache_bytes(level: int, otherwise: int) -> int:
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if int((folder / "level").read_text("utf-8")) != level:
                continue
            if (folder / "type").read_text("utf-8").strip() == "Instruction":
                continue
            text = (folder / "size").read_text("utf-8").strip()
        except (OSError, ValueError):
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        return int(text.rstrip("KMG")) * unit
    return otherwise
