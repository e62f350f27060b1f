"""The machine that kernels are built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """What generated code and measurements depend on.

    Attributes:
        cpu: the CPU's model name.
        isa: avx512, avx2, neon or generic.
        lanes: float32 elements in a vector register.
        threads: threads that an executable uses.
        l1_bytes: level-1 data cache of a core.
        l2_bytes: level-2 cache of a core.
        l3_bytes: level-3 cache that the cores share.
        compiler: the compiler's name and version.
    """

    cpu: str = "generic"
    isa: str = "avx512"
    lanes: int = 16
    threads: int = 2
    l1_bytes: int = 32 << 10
    l2_bytes: int = 1 << 20
    l3_bytes: int = 32 << 20
    compiler: str = ""
