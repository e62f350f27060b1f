"""The CUDA device that kernels are built for: a device of this machine, or a kind of device by name."""

import hashlib
import re
from dataclasses import dataclass

from korch.candidate.candidate import ALL_PAIRS
from korch.errors import OptionError
from korch.primitive.types import DType
from korch.tile.ir.program import Product


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """What generated code and measurements depend on.

    Attributes:
        arch: the compute capability as a number: 90 for 9.0.
        name: the device's name.
        processors: the number of multiprocessors.
        l2_bytes: the size of the level-2 cache.
        shared_bytes: the most shared memory of a program.
        copy_bytes_per_s: bytes read plus bytes written per second by a copy that exceeds the level-2 cache.
        l2_bytes_per_s: the same by a copy within the level-2 cache.
        f32_flop_per_s: operations per second without matrix units.
        tf32_flop_per_s: operations per second of float32 (TF32) products on matrix units.
        half_flop_per_s: operations per second of float16 and bfloat16 products on matrix units.
        launch_ns: the least time of a kernel in a CUDA graph, however small the kernel is.
        allow_tf32: whether float32 products may round their operands to 11 bits.
        allow_split: whether a float32 product may be computed as several products of bfloat16.
        is_nominal: whether the rates are from a data sheet instead of measured.
        versions: the software versions that timings depend on, as "name version".
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
        """Channels of a block in blocked layouts: 0, because there are no blocked layouts."""
        return 0

    def products(self, dtype: DType, is_exact: bool = False) -> tuple[Product, ...]:
        """Return the ways to multiply elements of a type, the fastest first.

        Without TF32, float32 is multiplied on matrix units with each operand split into three bfloat16, or without
        matrix units.

        `is_exact`: whether operands must not be rounded even if the target allows it.
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
        """Return the peak rate of a way to multiply; a split product consists of several products of bfloat16."""
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
        """A hash of all that measurements depend on apart from the kernel; it is part of their key."""
        text = repr((self.arch, self.name, self.processors, self.versions))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


NOMINAL = {
    80: CudaTarget(80, "sm_80 as in an A100", 108, 40 << 20, 163 << 10, 1.8e12, 4.5e12, 19.5e12, 156e12, 312e12, 1800),
    90: CudaTarget(90, "sm_90 as in an H200", 132, 50 << 20, 227 << 10, 4.3e12, 7.5e12, 67e12, 495e12, 990e12, 1500),
}
"""Data-sheet rates (A100 80 GB, H200), for plans without a device; the copy rates are measured."""


def planning_fingerprint(target: CudaTarget) -> str:
    """Return a hash of all that the kernels of a target depend on; its rates are those of a data sheet."""
    facts = (target.arch, target.processors, target.shared_bytes, target.allow_tf32, target.allow_split)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def nominal_target(text: str) -> CudaTarget:
    """Return the target that a text such as `cuda:sm_90` names.

    Raises:
        OptionError: there is no such target.
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
