"""Prints elementwise operations; 16-bit floats are computed as float32, truth values are bits."""

import struct

from korch.primitive.types import DType
from korch.tile.ir.growth import UnprintableError
from korch.tile.llvm.emit import Emit, SsaValue, constant
from korch.tile.llvm.functions import Functions, fused
from korch.tile.llvm.isa import Isa
from korch.tile.llvm.wide import LANES as WIDE
from korch.tile.llvm.wide import WideFunctions

KIND = {
    DType.F64: "double",
    **dict.fromkeys((DType.F32, DType.F16, DType.BF16), "float"),
    **dict.fromkeys((DType.I64, DType.U64), "i64"),
    **dict.fromkeys((DType.I32, DType.U32), "i32"),
    **dict.fromkeys((DType.I16, DType.U16), "i16"),
    **dict.fromkeys((DType.I8, DType.U8), "i8"),
    DType.BOOL: "i1",
}
"""The type in which each element type is computed."""

NARROW = (DType.F16, DType.BF16)

FLOAT_OPS = {"add": "fadd contract", "sub": "fsub contract", "mul": "fmul contract", "div": "fdiv"}
INTEGER_OPS = {"add": "add", "sub": "sub", "mul": "mul", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}
TESTS = {"equal": ("eq", "oeq"), "less": ("lt", "olt"), "less_equal": ("le", "ole")}
ROUNDINGS = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "rint": "rint", "round": "rint"}
FUNCTIONS = ("exp", "log", "tanh", "erf", "sigmoid")
LIBRARY = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh")
LIBRARY_OF_DOUBLE = ("exp", "log", "tanh", "erf")
OPS = {
    *(*FLOAT_OPS, *INTEGER_OPS, *TESTS, *ROUNDINGS, *FUNCTIONS, *LIBRARY),
    *("neg", "abs", "sign", "reciprocal", "max", "min", "cast", "round_tf32"),
    *("not", "isnan", "isinf", "and", "or", "xor", "pow", "mod", "bitwise_not", "shift_left", "shift_right", "where"),
}
"""The operations that are printed."""


def is_signed(dtype: DType) -> bool:
    """Return whether an integer type has negative numbers."""
    return dtype.value.startswith("i")


class Arithmetic:
    """Prints operations of values, which may have one lane or several."""

    def __init__(self, emit: Emit, isa: Isa) -> None:
        self.emit, self.isa = emit, isa
        self._halves: dict[tuple[int, str, DType], SsaValue] = {}  # what numbers of each function were widened from

    def apply(self, op: str, dtype: DType, source: DType, arguments: list[SsaValue]) -> SsaValue:
        """Print an operation of which `source` is the type of the last argument, `dtype` that of the result."""
        if op == "cast":
            return self.cast(arguments[0], source, dtype)
        if op == "where":
            return self.emit.select(*arguments)
        if op in ("not", "and", "or", "xor"):
            return self._logic(op, [self.truth(argument) for argument in arguments])
        return self._float(op, arguments) if source.is_float else self._integer(op, source, arguments)

    def truth(self, x: SsaValue) -> SsaValue:
        """Print whether a number is not 0."""
        if x.kind == "i1":
            return x
        zero = constant(x.kind, 0, x.lanes)
        return self.emit.test("icmp ne" if x.kind.startswith("i") else "fcmp une", x, zero)

    def functions(self, lanes: int) -> Functions:
        """Return the printer of functions of a number of lanes."""
        return (WideFunctions if lanes == WIDE and self.isa.is_avx512 else Functions)(self.emit, self.isa, lanes)

    def _logic(self, op: str, arguments: list[SsaValue]) -> SsaValue:
        if op == "not":
            return self.emit.op("xor", arguments[0], constant("i1", 1))
        return self.emit.op(op, *arguments)

    # Floats

    def _float(self, op: str, arguments: list[SsaValue]) -> SsaValue:
        emit, x = self.emit, arguments[0]
        zero, one = (constant(x.kind, n, x.lanes) for n in (0.0, 1.0))
        if op in FLOAT_OPS:
            return emit.op(FLOAT_OPS[op], *arguments)
        if op in TESTS:
            return emit.test(f"fcmp {TESTS[op][1]}", *arguments)
        if op in ("max", "min"):
            return self.extreme(op, *arguments)
        if op in ROUNDINGS:
            return self._intrinsic(ROUNDINGS[op], x)
        match op:
            case "neg":
                return emit.negated(x)
            case "abs":
                return self._intrinsic("fabs", x)
            case "sign":
                other = emit.select(emit.test("fcmp olt", x, zero), constant(x.kind, -1.0, x.lanes), x)
                return emit.select(emit.test("fcmp ogt", x, zero), one, other)
            case "reciprocal":
                return emit.op("fdiv", one, x)
            case "round_tf32":
                return self._as_tf32(x) if x.kind == "float" else x
            case "isnan":
                return emit.test("fcmp uno", x, x)
            case "isinf":
                infinity = constant(x.kind, float("inf"), x.lanes)
                return emit.test("fcmp oeq", self._intrinsic("fabs", x), infinity)
            case _:
                return self._function(op, arguments)

    def _as_tf32(self, x: SsaValue) -> SsaValue:
        emit = self.emit
        bits = emit.op("add", emit.bits(x, "i32"), constant("i32", 1 << 12))
        rounded = emit.bits(emit.op("and", bits, constant("i32", -1 << 13)), "float")
        return emit.select(emit.test("fcmp uno", x, x), x, rounded)

    def _function(self, op: str, arguments: list[SsaValue]) -> SsaValue:
        emit, x = self.emit, arguments[0]
        if op in FUNCTIONS and x.kind == "float":
            function: SsaValue = getattr(self.functions(x.lanes), op)(x)
            return function
        if op == "sigmoid":
            one = constant(x.kind, 1.0, x.lanes)
            power = self._library("exp", [emit.negated(x)])
            return emit.op("fdiv", one, emit.op("fadd", one, power))
        if op in ("pow", "mod"):
            suffix = "f" if x.kind == "float" else ""
            return self._library(f"{'fmod' if op == 'mod' else op}{suffix}", arguments)
        if op in LIBRARY or op in LIBRARY_OF_DOUBLE:
            found = self._library(op, [emit.convert("fpext", x, "double")])
            return emit.convert("fptrunc", found, x.kind)
        raise UnprintableError(f"the operation {op} of {x.kind} is not printed", where="tile program")

    def _intrinsic(self, name: str, x: SsaValue) -> SsaValue:
        kind = ("f32" if x.kind == "float" else "f64") if not x.kind.startswith("i") else x.kind
        vector = f"v{x.lanes}" if x.lanes > 1 else ""
        return self.emit.call(f"llvm.{name}.{vector}{kind}", x.kind, x.lanes, x)

    def _library(self, name: str, arguments: list[SsaValue]) -> SsaValue:
        """Print calls of a function of the C library, lane by lane."""
        arguments = list(self.emit.matched(*arguments))
        kind, lanes = arguments[0].kind, arguments[0].lanes
        found = [
            self.emit.call(name, kind, 1, *(self.emit.lane(a, i) for a in arguments), floor=self.emit.floor)
            for i in range(lanes)
        ]
        return found[0] if lanes == 1 else self.emit.joined(found)

    def extreme(self, op: str, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print the maximum or minimum; NaN if either is NaN."""
        emit = self.emit
        a, b = emit.matched(a, b)
        chosen = emit.select(emit.test("fcmp ogt" if op == "max" else "fcmp olt", b, a), b, a)
        if not b.text.startswith("%"):  # a number
            return chosen
        if self.isa.is_avx512 and b.kind == "float" and b.lanes in (8, 16):
            keep_nan = constant("i32", 0x22, b.lanes)  # NaN from b, all else from the chosen one
            rest = [SsaValue("0", "i32"), SsaValue("-1", f"i{b.lanes}")]
            rest += [SsaValue("4", "i32")] if b.lanes == WIDE else []
            name = f"llvm.x86.avx512.mask.fixupimm.ps.{32 * b.lanes}"
            return emit.call(name, b.kind, b.lanes, chosen, b, keep_nan, *rest)
        return emit.select(emit.test("fcmp uno", b, b), b, chosen)

    def combine(self, op: str, dtype: DType, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print the reduction of two numbers by sum, prod, max or min."""
        if dtype is DType.BOOL:
            return self.emit.op({"sum": "or", "max": "or", "prod": "and", "min": "and"}[op], a, b)
        name = {"sum": "add", "prod": "mul"}.get(op, op)
        return self._float(name, [a, b]) if dtype.is_float else self._integer(name, dtype, [a, b])

    def quotient_by(self, a: SsaValue, b: SsaValue, *, is_exact: bool) -> SsaValue:
        """Print a / b for a scalar b: a product with its inverse if this is a normal number.

        An exact quotient is rounded as a division is: the error of the product q is subtracted, since q b - a is exact
        in one fused operation, and q minus that times the inverse is the correctly rounded quotient (P. Markstein, IBM
        Journal of Research and Development 34, 1990, theorem 7). An infinite q is left unchanged.
        """
        emit = self.emit
        if a.kind != "float" or a.lanes == 1 or b.lanes > 1 or (is_exact and not self.isa.has_fma):
            return emit.op("fdiv", a, b)
        low, high = constant("float", 2.0**-126), constant("float", 2.0**126)
        size = b if is_exact else self._intrinsic("fabs", b)  # for a negative b, a zero would lose its sign
        is_normal = emit.op("and", emit.test("fcmp oge", size, low), emit.test("fcmp ole", size, high))
        if b.text.startswith("0x"):  # LLVM would leave a branch on constants
            (known,) = struct.unpack(">d", bytes.fromhex(b.text[2:]))
            is_normal = constant("i1", 2.0**-126 <= (known if is_exact else abs(known)) <= 2.0**126)
        inverse = emit.op("fdiv", constant("float", 1.0), b)

        def by_inverse() -> tuple[SsaValue]:
            q = emit.op("fmul", a, inverse)
            if not is_exact:
                return (q,)
            # For a finite q, the rest is less than b 2^106; subtracting at most that leaves an infinite q infinite.
            large = emit.test("fcmp olt", b, constant("float", 2.0**20))
            most = emit.select(large, emit.op("fmul", b, constant("float", 2.0**106)), high)
            rest = fused(emit, q, b, emit.negated(a))
            own = self.functions(a.lanes)
            rest = own.less_of(own.greater_of(rest, emit.splat(emit.negated(most), a.lanes)), emit.splat(most, a.lanes))
            return (fused(emit, emit.negated(rest), inverse, q),)

        return emit.branch(is_normal, by_inverse, lambda: (emit.op("fdiv", a, b),))[0]

    # Integers

    def _integer(self, op: str, dtype: DType, arguments: list[SsaValue]) -> SsaValue:
        emit, x = self.emit, arguments[0]
        sign = "s" if is_signed(dtype) else "u"
        zero = constant(x.kind, 0, x.lanes)
        if op in INTEGER_OPS:
            return emit.op(INTEGER_OPS[op] if dtype is not DType.BOOL else {"mul": "and"}.get(op, "or"), *arguments)
        if op in TESTS:
            name = TESTS[op][0]
            return emit.test(f"icmp {name if name == 'eq' else sign + name}", *arguments)
        if op in ("max", "min"):
            test = "gt" if op == "max" else "lt"
            a, b = emit.matched(*arguments)
            return emit.select(emit.test(f"icmp {sign}{test}", b, a), b, a)
        match op:
            case "neg":
                return emit.op("sub", zero, x)
            case "abs":
                return emit.select(emit.test(f"icmp {sign}gt", x, zero), x, emit.op("sub", zero, x))
            case "sign":
                negative = constant(x.kind, -1, x.lanes)
                other = emit.select(emit.test(f"icmp {sign}lt", x, zero), negative, x)
                return emit.select(emit.test(f"icmp {sign}gt", x, zero), constant(x.kind, 1, x.lanes), other)
            case "bitwise_not":
                return emit.op("xor", x, constant(x.kind, -1, x.lanes))
            case "div" | "mod":
                return self._divided(op, sign, *emit.matched(*arguments))
            case "shift_left" | "shift_right":
                return self._shifted(op, sign, *emit.matched(*arguments))
            case "round" | "floor" | "ceil" | "rint":
                return x
            case "isnan" | "isinf":
                return constant("i1", 0, x.lanes)
            case _:
                return self._through_double(op, dtype, arguments)

    def _through_double(self, op: str, dtype: DType, arguments: list[SsaValue]) -> SsaValue:
        wide = [self.cast(argument, dtype, DType.F64) for argument in arguments]
        return self.cast(self._float(op, wide), DType.F64, dtype)

    def _divided(self, op: str, sign: str, x: SsaValue, y: SsaValue) -> SsaValue:
        """Print a quotient rounded towards 0, or the remainder with the divisor's sign; 0 if the divisor is 0."""
        emit = self.emit
        zero, one, all_bits = (constant(x.kind, n, x.lanes) for n in (0, 1, -1))
        is_zero = emit.test("icmp eq", y, zero)
        is_special = is_zero
        if sign == "s":  # dividing the least integer by -1 would trap
            is_special = emit.op("or", is_zero, emit.test("icmp eq", y, all_bits))
        safe = y
        if y.text.startswith("%"):
            safe = emit.select(is_special, one, y)
        elif y.text == zero.text or (sign == "s" and y.text == all_bits.text):
            safe = one
        if op == "div":
            found = emit.op(f"{sign}div", x, safe)
            if sign == "s":
                found = emit.select(emit.test("icmp eq", y, all_bits), emit.op("sub", zero, x), found)
            return emit.select(is_zero, zero, found)
        rest = emit.op(f"{sign}rem", x, safe)
        if sign == "s":
            differs = emit.test("icmp slt", emit.op("xor", rest, y), zero)
            moved = emit.op("and", differs, emit.test("icmp ne", rest, zero))
            rest = emit.select(moved, emit.op("add", rest, y), rest)
        return emit.select(is_special, zero, rest)

    def _shifted(self, op: str, sign: str, x: SsaValue, y: SsaValue) -> SsaValue:
        """Print a shift; for a count beyond the width, it is 0, or -1 for a right shift of a negative number."""
        emit, bits = self.emit, int(x.kind[1:])
        is_inside = emit.test("icmp ult", y, constant(y.kind, bits))
        count = emit.select(is_inside, y, constant(y.kind, 0, y.lanes))
        beyond = constant(x.kind, 0, x.lanes)
        if op == "shift_left":
            return emit.select(is_inside, emit.op("shl", x, count), beyond)
        if sign == "s":
            beyond = emit.op("ashr", x, constant(x.kind, bits - 1, x.lanes))
        return emit.select(is_inside, emit.op("ashr" if sign == "s" else "lshr", x, count), beyond)

    # Conversions

    def cast(self, x: SsaValue, source: DType, dtype: DType) -> SsaValue:
        """Print a conversion of a number; a 16-bit float is rounded, but kept in 32 bits."""
        emit, kind = self.emit, KIND[dtype]
        if dtype is DType.BOOL:
            return self.truth(x)
        if dtype in NARROW:
            wide = self.cast(x, source, DType.F32)
            return wide if source is dtype else self.rounded(wide, dtype)
        if source is DType.BOOL:
            return emit.convert("uitofp" if dtype.is_float else "zext", x, kind)
        if source.is_float and dtype.is_float:
            return emit.convert("fpext" if kind == "double" else "fptrunc", x, kind)
        if dtype.is_float:
            return emit.convert("sitofp" if is_signed(source) else "uitofp", x, kind)
        if source.is_float:
            if dtype.size_bytes < 4:
                return emit.convert("trunc", emit.convert("fptosi", x, "i32"), kind)
            return emit.convert("fptosi" if is_signed(dtype) else "fptoui", x, kind)
        is_wider = int(kind[1:]) > int(x.kind[1:])
        return emit.convert(("sext" if is_signed(source) else "zext") if is_wider else "trunc", x, kind)

    def rounded(self, x: SsaValue, dtype: DType) -> SsaValue:
        """Print a float32 rounded to what a 16-bit float can hold."""
        return self.widened(self.narrowed(x, dtype), dtype)

    def narrowed(self, x: SsaValue, dtype: DType) -> SsaValue:
        """Print the 16 bits of a float32 that is rounded to nearest, ties to even.

        The instruction for bfloat16 takes subnormal numbers for 0, as that for their products does.
        """
        emit, own = self.emit, self.functions(x.lanes)
        if known := self._halves.get((len(emit.functions), x.text, dtype)):
            return known
        if self.isa.has_pairs if dtype is DType.BF16 else self.isa.has_half:
            return emit.bits(emit.convert("fptrunc", x, "bfloat" if dtype is DType.BF16 else "half"), "i16")
        b = own.bits(x)
        if dtype is DType.BF16:
            odd = emit.op("and", emit.op("lshr", b, own.integer(16)), own.integer(1))
            near = emit.op("add", emit.op("add", b, own.integer(0x7FFF)), odd)
            near = emit.select(emit.test("fcmp ord", x, x), near, emit.op("or", b, own.integer(0x400000)))
            return emit.convert("trunc", emit.op("lshr", near, own.integer(16)), "i16")
        a = emit.op("and", b, own.integer(0x7FFFFFFF))
        # Below 2^-14, adding 1/2 leaves the subnormal's bits, rounded to even, in the sum's lowest bits.
        tiny = own.bits(own.add(own.float_of(a), own.number(0.5)))
        small = emit.op("sub", tiny, own.integer(0x3F000000))
        odd = emit.op("and", emit.op("lshr", a, own.integer(13)), own.integer(1))
        normal = emit.op("add", emit.op("add", a, own.integer(0xFFF - 0x38000000)), odd)
        y = emit.select(
            emit.test("icmp ult", a, own.integer(0x38800000)), small, emit.op("lshr", normal, own.integer(13))
        )
        y = emit.select(emit.test("icmp uge", a, own.integer(0x477FF000)), own.integer(0x7C00), y)
        y = emit.select(emit.test("icmp ugt", a, own.integer(0x7F800000)), own.integer(0x7E00), y)
        sign = emit.op("and", emit.op("lshr", b, own.integer(16)), own.integer(0x8000))
        return emit.convert("trunc", emit.op("or", sign, y), "i16")

    def widened(self, x: SsaValue, dtype: DType) -> SsaValue:
        """Print the float32 of 16 bits."""
        wide = self._widened(x, dtype)
        self._halves[len(self.emit.functions), wide.text, dtype] = x
        return wide

    def _widened(self, x: SsaValue, dtype: DType) -> SsaValue:
        emit, own = self.emit, self.functions(x.lanes)
        if dtype is DType.F16 and self.isa.has_half:
            return emit.convert("fpext", emit.bits(x, "half"), "float")
        b = emit.convert("zext", x, "i32")
        if dtype is DType.BF16:
            return own.float_of(emit.op("shl", b, own.integer(16)))
        sign = emit.op("shl", emit.op("and", b, own.integer(0x8000)), own.integer(16))
        rest = emit.op("shl", emit.op("and", b, own.integer(0x7FFF)), own.integer(13))
        moved = own.bits(own.mul(own.float_of(rest), own.number(2.0**112)))
        exponent = emit.op("and", b, own.integer(0x7C00))
        is_large = emit.test("icmp eq", exponent, own.integer(0x7C00))
        y = emit.select(is_large, emit.op("or", rest, own.integer(0x7F800000)), moved)
        return own.float_of(emit.op("or", sign, y))
