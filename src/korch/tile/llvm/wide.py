"""Functions of vectors of 16 float32 with AVX-512.

Powers of two are looked up in a table in a register. tanh and erf are polynomials whose coefficients are also looked
up. A quotient is computed by an approximate inverse (14 bits) and a Newton step: a division of 16 numbers takes as long
as 20 other instructions.
"""

from korch.tile.llvm.emit import SsaValue, array
from korch.tile.llvm.functions import LN2_HIGH, LN2_LOW, LOG2_E, Functions
from korch.tile.llvm.tables import BASE, ERF, INVERSES, LOGS, LOGS_REST, ROOTS, ROOTS_WITHOUT, TANH, TANH_CENTERS

ERRORS = {"exp": 1.0, "log": 0.8, "tanh": 1.0, "erf": 2.3, "sigmoid": 2.2}
"""The largest error of each function, in units in the last place of a float32 that is not subnormal."""

LANES = 16
SIXTEENTHS = 1.5 * (1 << 19)
"""Adding it rounds to sixteenths; the sum's low bits are then the number of sixteenths."""

EIGHTHS = 1.5 * (1 << 20)

CURRENT, ALL = SsaValue("4", "i32"), SsaValue("-1", "i16")
"""The current rounding, and a mask of all lanes."""


class WideFunctions(Functions):
    """Prints functions of vectors of 16 float32."""

    def intrinsic(self, name: str, *operands: SsaValue) -> SsaValue:
        """Print an instruction of AVX-512 that returns 16 float32."""
        return self.emit.call(f"llvm.x86.avx512.{name}.512", "float", LANES, *operands)

    def entries(self, table: tuple[float, ...], indices: SsaValue) -> SsaValue:
        """Print the entries of a table of 16 or 32 numbers at the low bits of the indices."""
        if len(table) == LANES:
            return self.intrinsic("permvar.sf", array("float", table), indices)
        low, high = array("float", table[:LANES]), array("float", table[LANES:])
        return self.intrinsic("vpermi2var.ps", low, indices, high)

    def looked_up(self, table: tuple[tuple[float, ...], ...], indices: SsaValue, r: SsaValue) -> SsaValue:
        """Print a polynomial whose coefficients, lowest first, are looked up in the rows of a table."""
        y = self.entries(table[-1], indices)
        for row in table[-2::-1]:
            y = self.fused(y, r, self.entries(row, indices))
        return y

    def exp_from(self, least: float, x: SsaValue) -> SsaValue:
        """Print e^x where x >= least, and 0 elsewhere; x is at most 10^4."""
        # e^x = 2^n e^r for n in sixteenths. A lane whose product with 2^n is too small takes 240 cycles unless it is
        # masked out.
        number, emit = self.number, self.emit
        mask = emit.bits_of_mask(emit.test("fcmp uge", x, number(least)))
        a = self.greater_of(number(least), x)
        shifted = self.fused(a, number(LOG2_E), number(SIXTEENTHS))
        n = self.sub(shifted, number(SIXTEENTHS))
        r = self.fused(n, number(-LN2_LOW), self.fused(n, number(-LN2_HIGH), a))
        p = self.polynomial(r, (0.16666950285434723, 0.5000162720680237, 1.0))
        root = self.entries(ROOTS, self.bits(shifted))
        y = self.fused(self.mul(root, r), p, root)
        return self.intrinsic("mask.scalef.ps", y, n, number(0.0), mask, CURRENT)

    def exp(self, x: SsaValue) -> SsaValue:
        """Print e^x."""
        return self.exp_from(-103.98, self.less_of(self.number(89.0), x))

    def exp_of_nonpositive(self, x: SsaValue) -> SsaValue:
        """Print e^x for x <= 0; results below 2^-125 become 0."""
        return self.exp_from(-87.0, x)

    def log(self, x: SsaValue) -> SsaValue:
        """Print log x = e ln 2 + log m for m in [0.75, 1.5): m times a center's inverse is 1 + r."""
        # For 0 and infinity, the exponent and m are as needed: -infinity or infinity, and 1. NaN if x < 0.
        number, emit = self.number, self.emit
        m = self.intrinsic("mask.getmant.ps", x, SsaValue(str(3 | 3 << 2), "i32"), x, ALL, CURRENT)
        e = self.sub(*(self.intrinsic("mask.getexp.ps", v, v, ALL, CURRENT) for v in (x, m)))
        indices = emit.op("lshr", self.bits(m), self.integer(18))
        r = self.fused(m, self.entries(INVERSES, indices), number(-1.0))
        h = self.polynomial(r, (0.1886608, -0.250074595, 0.33334437, -0.5))
        low = self.fused(e, number(1.42860677e-06), self.entries(LOGS_REST, indices))
        high = self.fused(e, number(0.693145751953125), self.entries(LOGS, indices))
        return self.add(high, self.add(r, self.fused(self.mul(r, r), h, low)))

    def sigmoid(self, x: SsaValue) -> SsaValue:
        """Print 1 / (1 + e^-x); 0 below -88.4."""
        # e^-x = 2^n e^-r. The product n a is exact. Using the float nearest to ln 2 / a in (n a) (ln 2 / a)
        # causes an error of n 10^-11, the least among all a of 12 bits.
        number, emit = self.number, self.emit
        a, ln2_by_a, one = 2579.0 / 4096, float.fromhex("0x1.19d24ap+0"), number(1.0)
        bounded = self.less_of(number(64.0), x)  # 1 + e^-64 is 1
        shifted = self.fused(bounded, number(-LOG2_E), number(SIXTEENTHS))
        r = self.fused(self.fused(shifted, number(a), number(-SIXTEENTHS * a)), number(ln2_by_a), bounded)
        # After the shift, the integer part of n is at the exponent's bits, with j below it: 2^n / BASE.
        n = self.bits(shifted)
        entries = emit.call("llvm.x86.avx512.permvar.si.512", "i32", LANES, array("i32", ROOTS_WITHOUT), n)
        power = self.float_of(emit.op("add", entries, emit.op("shl", n, self.integer(19))))
        # BASE e^-r is less than 1, where the rounding error is half as large as above 1.
        p = self.polynomial(r, (-0.162531123, 0.487600744, -BASE, BASE))
        total = self.fused(power, p, one)
        inverse = self.intrinsic("rcp14.ps", total, total, ALL)
        negative = emit.negated(inverse)
        y = self.fused(inverse, self.fused(negative, total, one), inverse)
        return emit.select(emit.test("fcmp uge", x, number(-88.4)), y, number(0.0))

    def tanh(self, x: SsaValue) -> SsaValue:
        """Print tanh x, by polynomials on quarters of octaves from 2^-4 to 9.02."""
        a = self.less_of(self.number(9.02), self.magnitude(x))
        indices = self.emit.op("lshr", self.bits(self.greater_of(self.number(0.0625), a)), self.integer(21))
        r = self.sub(a, self.entries(TANH_CENTERS, indices))
        return self.with_sign(self.looked_up(TANH, indices, r), x)

    def erf(self, x: SsaValue) -> SsaValue:
        """Print erf x, by polynomials around multiples of 1/8 up to 3.925, beyond which the result rounds to 1."""
        a = self.less_of(self.number(3.925), self.magnitude(x))
        shifted = self.add(a, self.number(EIGHTHS))  # rounds to eighths; the low bits are their number
        rest = self.intrinsic("mask.reduce.ps", a, SsaValue(str(3 << 4 | 8), "i32"), a, ALL, CURRENT)
        return self.with_sign(self.looked_up(ERF, self.bits(shifted), rest), x)
