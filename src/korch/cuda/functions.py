"""Functions that generated Triton kernels call; each is exact or accurate to a few ulps.

They use only features that both Triton's compiler and its interpreter support, so that kernels can be
checked without a GPU. Arguments and results are tiles of float32 or float64 unless said otherwise.
"""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def larger(a, b):
    """Return the maximum; NaN if either argument is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """Return the minimum; NaN if either argument is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def added(a, b):
    """Return the sum."""
    return a + b


@triton.jit
def multiplied(a, b):
    """Return the product."""
    return a * b


@triton.jit
def square_root(x):
    """Return the square root, correctly rounded for float32."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    return tl.sqrt(x)


@triton.jit
def sign(x):
    """Return -1, 0 or 1; NaN for NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def as_tf32(x):
    """Return float32 rounded to the 11 bits that matrix units use; they would truncate, which biases the result."""
    if x.dtype != tl.float32:
        return x
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def exp_of_nonpositive(x):
    """Return e^x for x <= 0; subnormal results become 0, which saves three instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def exp_below(x, top):
    """Return e^(x - top) for x <= top; NaN if their difference is. Subnormal results become 0.

    With one `top` per row, an element takes one multiply-add and one power of two. The product of `top` is rounded,
    which changes all results of a row by the same factor, at most 2^-24 |top|. Where it could overflow, elements
    differ by 0 or by more than 2^100, so any factor gives e^0 or 0.
    """
    if x.shape[1] == top.shape[1]:
        return exp_of_nonpositive(x - top)
    factor = tl.where(tl.abs(top) < 1e38, 1.4426950408889634, 0.5)
    return tl.exp2(x * factor - top * factor)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x); 0 where e^-x overflows."""
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def one_plus_tanh(x):
    """Return 1 + tanh(x) without the cancellation of the sum; 0 where e^-2x overflows."""
    return 2.0 / (1.0 + tl.exp2(x * -2.8853900817779268))


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent; near 0, where the quotient suffers from cancellation, by an odd polynomial."""
    size = tl.abs(x)
    small = tl.exp(-2.0 * size)
    far = (1.0 - small) / (1.0 + small)
    y = x * x
    near = size * (
        1.0
        + y
        * (
            -0.3333333333
            + y
            * (0.1333333333 + y * (-0.05396825397 + y * (0.02186948854 + y * (-0.008863235530 + y * 0.003592128037))))
        )
    )
    limit: tl.constexpr = 1e-2 if x.dtype == tl.float64 else 0.3
    found = tl.where(size < limit, near, far)
    return tl.where(x != x, x, tl.where(x < 0, -found, found))


@triton.jit
def round_to_even(x):
    """Return the nearest integer, ties to even; from 2^22 on float32 is returned unchanged: it is (nearly) whole."""
    big = 12582912.0
    return tl.where(tl.abs(x) < 4194304.0, (x + big) - big, x)


@triton.jit
def power(x, y):
    """Return x^y with the special cases of IEEE 754, accurate to about |y log x| ulps."""
    size = tl.abs(x)
    found = tl.exp2(y * tl.log2(size))
    half = tl.floor(y * 0.5)
    is_whole = tl.floor(y) == y
    is_odd = is_whole & (half * 2.0 != y)
    found = tl.where((x < 0) & is_odd, -found, found)
    found = tl.where((x < 0) & (tl.floor(y) != y) & (size != float("inf")), float("nan"), found)
    found = tl.where((x != x) | (y != y), x + y, found)
    found = tl.where((size == 1.0) & (tl.abs(y) == float("inf")), 1.0, found)
    return tl.where((y == 0) | (x == 1.0), 1.0, found)


@triton.jit
def truncated_quotient(a, b):
    """Return a / b of integers, rounded towards 0; 0 where b is 0."""
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b))


@triton.jit
def floored_remainder(a, b):
    """Return a - b * floor(a / b) of integers; 0 where b is 0."""
    divisor = tl.where(b == 0, 1, b)
    rest = a % divisor
    rest = tl.where((rest != 0) & ((rest < 0) != (divisor < 0)), rest + divisor, rest)
    return tl.where(b == 0, 0, rest)


# How a kernel begins that may begin early (`korch.cuda.runtime.early`). These need sm_90, and are not interpreted.


@triton.jit
def begin_next():
    """Let the next kernel begin once all programs of this one have come here."""
    gdc_launch_dependents()


@triton.jit
def wait_for_earlier():
    """Wait until the kernel before has ended, and see what it wrote."""
    gdc_wait()


@triton.jit
def prefetch(pointer, first, lines, each: tl.constexpr):
    """Bring lines of 128 bytes into the level-2 cache: `each` lines from number `first` on, of those below `lines`."""
    line = first + tl.arange(0, each)
    inside = ((line >= 0) & (line < lines)).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointer.to(tl.int64) + line.to(tl.int64) * 128, inside],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
