"""Elementary functions of float32 vectors, as polynomials after a range reduction of the argument.

NaN propagates; infinities give the limits. Vectors of 16 numbers with AVX-512 have methods of their own
(`korch.tile.llvm.tables`). `ERRORS` states the largest errors.
"""

import math

from korch.tile.llvm.emit import Emit, SsaValue, constant
from korch.tile.llvm.isa import Isa

ERRORS = {"exp": 1.5, "log": 1.5, "tanh": 1.5, "erf": 6.2, "sigmoid": 2.5}
"""The largest error of each function, in units in the last place of a float32 that is not subnormal."""

LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4
"""ln 2 as a sum whose first part has few bits."""

MAGIC = 12582912.0
"""1.5 * 2^23: adding it rounds to an integer, which is in the sum's low bits."""

MAGIC_BITS = 0x4B400000

EXP = (1.395171725e-03, 8.369598410e-03, 4.166618728e-02, 1.666651289e-01, 5.000000101e-01)
EXP_OF_NEGATIVE = (1.395171725e-03, -8.369598410e-03, 4.166618728e-02, -1.666651289e-01, 5.000000101e-01)
LOG = (
    *(6.915125880e-02, -1.178968486e-01, 1.187302006e-01, -1.238437238e-01, 1.421865518e-01),
    *(-1.666924933e-01, 2.000222671e-01, -2.499998663e-01, 3.333331044e-01),
)
TANH = (-5.717036561e-03, 2.065057900e-02, -5.374349526e-02, 1.333149125e-01, -3.333328392e-01)
ERF_ABOVE = (2.025857156695565e-06, 2.8466727e-04, 3.8076851e-03, 5.2873943e-02, 1.9154061e-01, 1.1283791e00)
ERF_BELOW = (3.7830199e-05, 1.1705920e-03, 1.5054142e-02, 1.1455542e-01, 5.0308114e-01, 1.0)


class Functions:
    """Prints functions of values of one number of lanes."""

    def __init__(self, emit: Emit, isa: Isa, lanes: int) -> None:
        self.emit, self.isa, self.lanes = emit, isa, lanes

    # Steps

    def number(self, x: float) -> SsaValue:
        """Return a float32 in each lane."""
        return constant("float", x, self.lanes)

    def integer(self, x: int) -> SsaValue:
        """Return a 32-bit integer in each lane."""
        return constant("i32", x, self.lanes)

    def add(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print a sum that is rounded."""
        return self.emit.op("fadd", a, b)

    def sub(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print a difference that is rounded."""
        return self.emit.op("fsub", a, b)

    def mul(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print a product that is rounded."""
        return self.emit.op("fmul", a, b)

    def fused(self, a: SsaValue, b: SsaValue, c: SsaValue) -> SsaValue:
        """Print a b + c, rounded once if the instruction set can."""
        return fused(self.emit, a, b, c)

    def polynomial(self, x: SsaValue, coefficients: tuple[float, ...]) -> SsaValue:
        """Print a polynomial by Horner's rule, highest coefficient first."""
        y = self.number(coefficients[0])
        for each in coefficients[1:]:
            y = self.fused(y, x, self.number(each))
        return y

    def less_of(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print a < b ? a : b, one instruction on x86."""
        return self.emit.select(self.emit.test("fcmp olt", a, b), a, b)

    def greater_of(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print a > b ? a : b."""
        return self.emit.select(self.emit.test("fcmp ogt", a, b), a, b)

    def clamped(self, x: SsaValue, least: float, most: float) -> SsaValue:
        """Print x between two bounds; NaN is kept."""
        return self.less_of(self.number(most), self.greater_of(self.number(least), x))

    def bits(self, x: SsaValue) -> SsaValue:
        """Return a float's bits."""
        return self.emit.bits(x, "i32")

    def float_of(self, x: SsaValue) -> SsaValue:
        """Return the float with these bits."""
        return self.emit.bits(x, "float")

    def magnitude(self, x: SsaValue) -> SsaValue:
        """Print x without its sign."""
        return self.float_of(self.emit.op("and", self.bits(x), self.integer(0x7FFFFFFF)))

    def with_sign(self, size: SsaValue, sign: SsaValue) -> SsaValue:
        """Print a positive number with another number's sign."""
        bit = self.emit.op("and", self.bits(sign), self.integer(-(1 << 31)))
        return self.float_of(self.emit.op("or", self.bits(size), bit))

    def power_of(self, shifted: SsaValue) -> SsaValue:
        """Return the power of two whose exponent bits are the low bits of a number."""
        return self.float_of(self.emit.op("shl", self.bits(shifted), self.integer(23)))

    def reduced(self, a: SsaValue, magic: float) -> tuple[SsaValue, SsaValue]:
        """Return n + magic and r, with a = n ln 2 + r."""
        shifted = self.fused(a, self.number(LOG2_E), self.number(magic))
        n = self.sub(shifted, self.number(magic))
        r = self.fused(n, self.number(-LN2_LOW), self.fused(n, self.number(-LN2_HIGH), a))
        return shifted, r

    def exp_near_0(self, r: SsaValue) -> SsaValue:
        """Print e^r for a small r."""
        one = self.number(1.0)
        return self.fused(self.fused(self.polynomial(r, EXP), r, one), r, one)

    # Functions

    def exp(self, x: SsaValue) -> SsaValue:
        """Print e^x."""
        emit = self.emit
        # Beyond these the result is 0 or infinite. Of the two factors of about 2^(n/2), neither overflows or
        # underflows before the product does; the second is 0 for the least n.
        shifted, r = self.reduced(self.clamped(x, -105.4, 89.0), MAGIC)
        k = emit.op("sub", self.bits(shifted), self.integer(MAGIC_BITS))
        half = emit.op("ashr", k, self.integer(1))
        one = self.power_of(emit.op("add", half, self.integer(127 + 51)))
        two = self.power_of(emit.op("add", emit.op("sub", k, half), self.integer(127 - 51)))
        return self.mul(self.mul(self.exp_near_0(r), one), two)

    def exp_of_nonpositive(self, x: SsaValue) -> SsaValue:
        """Print e^x for x <= 0; results below 2^-125 become 0, which suffices for a softmax."""
        low = self.number(-87.0)
        shifted, r = self.reduced(self.greater_of(low, x), MAGIC + 127)
        y = self.mul(self.exp_near_0(r), self.power_of(shifted))
        return self.emit.select(self.emit.test("fcmp olt", x, low), self.number(0.0), y)

    def log(self, x: SsaValue) -> SsaValue:
        """Print log x."""
        emit, number = self.emit, self.number
        tiny = emit.test("fcmp olt", x, number(1.17549435e-38))
        whole = emit.select(tiny, self.mul(x, number(8388608.0)), x)
        offset = emit.select(tiny, number(23.0), number(0.0))
        # 2^e m with m in [sqrt(1/2), sqrt(2))
        b = emit.op("sub", self.bits(whole), self.integer(0x3F3504F3))
        e = emit.convert("sitofp", emit.op("ashr", b, self.integer(23)), "float")
        m = emit.op("add", emit.op("and", b, self.integer(0x007FFFFF)), self.integer(0x3F3504F3))
        exponent, f = self.sub(e, offset), self.sub(self.float_of(m), number(1.0))
        square = self.mul(f, f)
        small = self.mul(self.polynomial(f, LOG), self.mul(square, f))
        small = self.fused(square, number(-0.5), small)
        y = self.add(self.fused(exponent, number(LN2_LOW), small), f)
        y = self.fused(exponent, number(LN2_HIGH), y)
        y = emit.select(emit.test("fcmp oeq", x, number(math.inf)), x, y)
        y = emit.select(emit.test("fcmp oeq", x, number(0.0)), number(-math.inf), y)
        return emit.select(emit.test("fcmp oge", x, number(0.0)), y, number(math.nan))

    def tanh(self, x: SsaValue) -> SsaValue:
        """Print tanh x."""
        emit, number = self.emit, self.number
        a = self.magnitude(x)
        z = self.mul(a, a)
        small = self.fused(self.mul(self.polynomial(z, TANH), z), a, a)
        capped = self.less_of(a, number(20.0))
        below = self.add(self.exp(self.add(capped, capped)), number(1.0))
        large = self.sub(number(1.0), emit.op("fdiv", number(2.0), below))
        y = emit.select(emit.test("fcmp olt", a, number(0.625)), small, large)
        return emit.select(emit.test("fcmp uno", x, x), x, self.with_sign(y, x))

    def erf(self, x: SsaValue) -> SsaValue:
        """Print erf x: an odd rational function; beyond 3.95 the result rounds to 1."""
        a = self.clamped(x, -3.95, 3.95)
        z = self.mul(a, a)
        above = self.mul(a, self.polynomial(z, ERF_ABOVE))
        return self.clamped(self.emit.op("fdiv", above, self.polynomial(z, ERF_BELOW)), -1.0, 1.0)

    def sigmoid(self, x: SsaValue) -> SsaValue:
        """Print 1 / (1 + e^-x)."""
        number, magic = self.number, MAGIC + 127
        a = self.clamped(x, -89.0, 87.0)
        # -a = n ln 2 - r. The low bits of `shifted` are the exponent bits of 2^n, infinite from n = 128 on.
        shifted = self.fused(a, number(-LOG2_E), number(magic))
        n = self.sub(shifted, number(magic))
        r = self.fused(n, number(LN2_LOW), self.fused(n, number(LN2_HIGH), a))
        y = self.fused(self.polynomial(r, EXP_OF_NEGATIVE), r, number(-1.0))
        y = self.fused(y, r, number(1.0))
        return self.emit.op("fdiv", number(1.0), self.fused(y, self.power_of(shifted), number(1.0)))


def fused(emit: Emit, a: SsaValue, b: SsaValue, c: SsaValue) -> SsaValue:
    """Print a b + c, rounded once if the instruction set can."""
    a, b, c = emit.matched(a, b, c)
    kind = (f"v{a.lanes}" if a.lanes > 1 else "") + ("f32" if a.kind == "float" else "f64")
    return emit.call(f"llvm.fmuladd.{kind}", a.kind, a.lanes, a, b, c)
