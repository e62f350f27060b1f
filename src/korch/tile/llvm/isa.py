"""What the printer and LLVM must know about an instruction set."""

from dataclasses import dataclass

_AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2", "prfchw")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
_VNNI = (*_AVX512, "avx512vnni")
_AARCH64 = "aarch64-unknown-linux-gnu"


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set."""

    name: str  # its name in a target
    triple: str = "x86_64-unknown-linux-gnu"  # LLVM's name of the architecture and the system
    features: tuple[str, ...] = ()  # LLVM's names of its extensions

    @property
    def is_avx512(self) -> bool:
        """Whether it has AVX-512, with masks."""
        return "avx512f" in self.features

    @property
    def has_pairs(self) -> bool:
        """Whether vectors multiply pairs of bfloat16."""
        return not {"avx512bf16", "bf16"}.isdisjoint(self.features)

    @property
    def is_x86(self) -> bool:
        """Whether the architecture is x86-64."""
        return self.triple.startswith("x86_64")

    @property
    def has_fma(self) -> bool:
        """Whether a product and a sum can be rounded once."""
        return "fma" in self.features or not self.is_x86

    @property
    def has_half(self) -> bool:
        """Whether it converts 16-bit floats."""
        return "f16c" in self.features or not self.is_x86


ISAS = {
    isa.name: isa
    for isa in (
        Isa("amx", features=(*_VNNI, "amx-tile", "amx-int8", "amx-bf16")),
        Isa("avx512_bf16", features=(*_VNNI, "avx512bf16")),
        Isa("avx512_vnni", features=_VNNI),
        Isa("avx512", features=_AVX512),
        Isa("avx2", features=_AVX2),
        Isa("neon_bf16", _AARCH64, ("neon", "dotprod", "i8mm", "bf16")),
        Isa("neon_dot", _AARCH64, ("neon", "dotprod")),
        Isa("neon", _AARCH64, ("neon",)),
        Isa("generic"),
    )
}
"""The instruction sets for which kernels are printed."""
