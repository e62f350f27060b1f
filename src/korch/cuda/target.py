"""The CUDA device that kernels are built for: the one at hand, or a kind of devices by name."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from korch.candidate.candidate import ALL_PAIRS
from korch.errors import OptionError
from korch.primitive.types import DType
from korch.tile.program import Product


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """What generated code and measurements depend on.

    Attributes:
        arch: compute capability as a number: 90 for 9.0.
        name: the device's name.
        processors: multiprocessors.
        l2_bytes: level-2 cache.
        shared_bytes: most shared memory of a program.
        copy_bytes_per_s: bytes read plus bytes written per second by a copy beyond the cache.
        l2_bytes_per_s: the same within it.
        f32_flop_per_s: operations per second without matrix units.
        tf32_flop_per_s: of float32 products on matrix units.
        half_flop_per_s: of float16 and bfloat16 products on matrix units.
        launch_ns: what a kernel takes in a CUDA graph, however small it is.
        allow_tf32: whether float32 products may round their factors to 11 bits.
        allow_split: whether a float32 product may be several products of bfloat16.
        is_nominal: whether the rates are those of a data sheet, not measured.
        versions: those that timings depend on, as "name version".
    """

    arch: int
    name: str
    processors: int
    l2_bytes: int
    shared_bytes: int
    copy_bytes_per_s: float
    l2_bytes_per_s: float
    f32_flop_per_s: float
    tf32_flop_per_s: float
    half_flop_per_s: float
    launch_ns: int
    allow_tf32: bool = False
    allow_split: bool = True
    is_nominal: bool = True
    versions: tuple[str, ...] = ()

    @property
    def lanes(self) -> int:
        """Channels of a block in blocked layouts: 0, there are none."""
        return 0

    def products(self, dtype: DType, is_exact: bool = False) -> tuple[Product, ...]:
        """Return the ways to multiply elements of a type, the fastest first.

        Float32 is multiplied by matrix units, as three numbers of bfloat16 for each factor, or without them.

        Args:
            dtype: the type.
            is_exact: whether factors must not be rounded, though the target allows it.
        """
        if dtype in (DType.F16, DType.BF16):
            return (Product.F16 if dtype is DType.F16 else Product.BF16,)
        if dtype is not DType.F32:
            return (Product.F64,) if dtype is DType.F64 else ()
        if self.allow_tf32 and not is_exact:
            return (Product.TF32,)
        found = (Product.SPLIT, Product.F32) if self.allow_split else (Product.F32,)
        return tuple(sorted(found, key=self.flop_per_s, reverse=True))

    def flop_per_s(self, product: Product) -> float:
        """Return the peak of products; a split product is several products of bfloat16."""
        match product:
            case Product.SPLIT:
                return self.half_flop_per_s / ALL_PAIRS
            case Product.F16 | Product.BF16:
                return self.half_flop_per_s
            case Product.TF32:
                return self.tf32_flop_per_s
            case _:
                return self.f32_flop_per_s

    @property
    def isa(self) -> str:
        """The architecture as compilers name it."""
        return f"sm_{self.arch}"

    @property
    def fingerprint(self) -> str:
        """A hash of what measurements depend on: they are kept apart by it."""
        text = repr((self.arch, self.name, self.processors, self.allow_tf32, self.allow_split, self.versions))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


NOMINAL = {
    80: CudaTarget(80, "sm_80 as in an A100", 108, 40 << 20, 163 << 10, 1.8e12, 4.5e12, 19.5e12, 156e12, 312e12, 1800),
    90: CudaTarget(90, "sm_90 as in an H200", 132, 50 << 20, 227 << 10, 4.3e12, 7.5e12, 67e12, 495e12, 990e12, 1500),
}
"""Rates by data sheet (A100 80 GB, H200), for plans without a device; copies as measured."""


def nominal_target(text: str) -> CudaTarget:
    """Return the kind of devices that `cuda:sm_90` names.

    Raises:
        OptionError: there is none.
    """
    match = re.fullmatch(r"cuda:sm_(\d+)", text)
    known = NOMINAL.get(int(match[1])) if match else None
    if known is None:
        raise OptionError(
            f"unknown target {text!r}",
            where="option target",
            expected="cpu, cuda, or " + ", ".join(f"cuda:sm_{arch}" for arch in NOMINAL),
        )
    return known
