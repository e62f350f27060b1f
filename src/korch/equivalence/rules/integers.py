"""Rules that compute products of dequantized bytes as exact 32-bit sums, and that fold stored weights.

conv(dequantize(a), dequantize(w)) has float32 products and sums. The 32-bit sum of products of the bytes is exact, and
one multiplication by both scales follows. So the result is closer to the exact one than a float32 sum.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from korch.equivalence.affine_chains import AxisConstant, axis_constant
from korch.equivalence.quantization import Dequantized, dequantized
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer, stands
from korch.primitive.graph import Primitive
from korch.primitive.op import Array, Category
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import PadAttributes
from korch.primitive.ops.linear import BYTES, ConvAttributes
from korch.primitive.pattern import Found, op
from korch.primitive.quantized import integer_conv, integer_matmul, largest_terms
from korch.primitive.types import DType, ValueId, ValueType

LINEAR = ("conv", "matmul")

MOST_TERMS = 32_000
"""The most products of bytes whose sum stays below 2^31, with room for a bias."""

LARGEST_BIAS = 1 << 24
"""Integers below it are exact in float32, and can be added to a sum of `MOST_TERMS` products."""

STEPS = 16
"""The longest path of primitives from a stored constant to its use that is followed."""

LARGEST_BYTES = 1 << 30
"""The most bytes of a constant that is computed at build time."""


@dataclass(frozen=True, slots=True)
class ProductMatch:
    """A product, and the dequantizations of its operands."""

    root: Primitive
    left: Dequantized
    right: Dequantized


def _match_product(view: View, root: Primitive) -> Iterator[ProductMatch]:
    if not view.type(root.output).dtype.is_float:
        return
    for left in dequantized(view, root.inputs[0]):
        for right in dequantized(view, root.inputs[1]):
            yield ProductMatch(root, left, right)


def _integer_product(view: View, match: ProductMatch) -> Write | RuleRefusal:
    root, left, right = match.root, match.left, match.right
    if not {left.grid.dtype, right.grid.dtype} <= {*BYTES}:
        return RuleRefusal("the integers have more than 8 bits", root.output)
    if largest_terms(root.op, view.shape(root.inputs[1])) > MOST_TERMS:
        return RuleRefusal("a sum could exceed 32 bits", root.output)
    rank = view.type(root.output).rank
    is_conv = root.op == "conv"
    rows, columns, axis = (None, 0, 1) if is_conv else (rank - 2, rank - 1, rank - 1)
    if not {left.grid.scale.axis, left.grid.zero.axis} <= {None, rows}:
        return RuleRefusal("the data's scale varies along the sum", root.output)
    if not {right.grid.scale.axis, right.grid.zero.axis} <= {None, columns}:
        return RuleRefusal("the weights' scale varies along the sum", root.output)
    scales = [
        AxisConstant(place if grid.scale.axis is not None else None, grid.scale.vector)
        for grid, place in ((left.grid, rows), (right.grid, axis))
    ]
    if None in (scales[0].axis, scales[1].axis):
        place = scales[0].axis if scales[1].axis is None else scales[1].axis
        scales = [AxisConstant(place, scales[0].vector * scales[1].vector)]
    if not all(_is_normal(scale.vector) for scale in scales):
        return RuleRefusal("a product of scales is no normal number", root.output)

    def write(writer: Writer) -> int:
        values = [ValueId(side.q) for side in (left, right)]
        zeros = [_zero(writer, side, root.op) for side in (left, right)]
        if isinstance(root.attributes, ConvAttributes):
            total = integer_conv(writer.verbs, values[0], values[1], zeros[0], zeros[1], root.attributes)
        else:
            total = integer_matmul(writer.verbs, values[0], values[1], zeros[0], zeros[1])
        type_ = writer.type(root.output)
        result = writer.add("cast", (total,), CastAttributes(type_.dtype.value))
        for scale in scales:
            result = writer.add("mul", (result, writer.along(scale.vector, scale.axis or 0, type_)))
        return result

    return write


def _is_normal(vector: Array) -> bool:
    limits = np.finfo(np.float32)
    return bool(((vector >= limits.tiny) & (vector <= limits.max)).all())


def _zero(writer: Writer, side: Dequantized, op: str) -> ValueId | None:
    """Write a zero point, as a vector for a convolution, along its axis for a matrix product; None for 0."""
    zero, rank = side.grid.zero, writer.type(side.q).rank
    if not np.any(zero.vector):
        return None
    vector = zero.vector if np.ndim(zero.vector) else zero.vector.reshape(1)
    if op == "matmul":
        shape = [1] * rank
        shape[zero.axis if zero.axis is not None else rank - 1] = len(vector)
        vector = vector.reshape(shape)
    return ValueId(writer.constant(vector, DType.I32))


PRODUCT_OF_DEQUANTIZED_IS_INTEGER = Rule(
    name="product-of-dequantized-is-integer",
    law="(s (a - z)) * (t (b - y)) = s t (a*b - z sum b - y sum a + n z y), of bytes a and b in 32 bits",
    source="bilinearity; Jacob et al. (CVPR 2018), equation 7",
    roots=("conv", "matmul"),
    match=_match_product,
    rewrite=_integer_product,
    reorders=True,
)


_SCALED = op("mul", op("cast", "sums", name="float"), "scale")
"""A sum of products as a float, times a scale."""


def _is_sum(view: View, found: Found) -> bool:
    return view.type(found.values["sums"]).dtype is DType.I32


def _bound(view: View, value: int, steps: int = STEPS) -> float:
    """Return what the absolute values of integers can't exceed; infinity if it is not known."""
    constant = view.stored_constant(value)
    if constant is not None:
        return float(np.abs(constant.array.astype(np.float64)).max(initial=0))
    if view.type(value).dtype in BYTES:
        return 255.0
    for root in view.producing(value, *LINEAR, "reduce_sum", *_COMBINED, *_MOVED) if steps else ():
        bounds = [_bound(view, each, steps - 1) for each in root.inputs]
        if root.op in LINEAR:
            return largest_terms(root.op, view.shape(root.inputs[1])) * math.prod(bounds)
        if isinstance(root.attributes, PadAttributes):
            bounds.append(abs(root.attributes.value))
        if root.op == "reduce_sum":
            return bounds[0] * view.type(root.inputs[0]).size / max(view.type(value).size, 1)
        return _COMBINED.get(root.op, max)(bounds)
    return math.inf


_COMBINED: Mapping[str, Callable[[list[float]], float]] = {"add": sum, "sub": sum, "mul": math.prod}

_MOVED = ("cast", "broadcast", "reshape", "transpose", "slice", "pad", "concat")


def _join_bias(view: View, match: Found) -> Write | RuleRefusal:
    root, sums = match.root, match.values["sums"]
    bias, scale = axis_constant(view, match.values["bias"]), axis_constant(view, match.values["scale"])
    if bias is None or scale is None or (None not in (bias.axis, scale.axis) and bias.axis != scale.axis):
        return RuleRefusal("the bias and the scale vary along different axes", root.output)
    with np.errstate(all="ignore"):
        steps = bias.vector / scale.vector
    whole = np.rint(steps)
    if not np.isfinite(steps).all() or (np.abs(steps - whole) > 2.0**-21 * np.abs(steps)).any():
        return RuleRefusal("the bias is no multiple of the scale", root.output)
    axis = bias.axis if bias.axis is not None else scale.axis
    for inner in view.producing(sums, "add"):
        offset = axis_constant(view, inner.inputs[1])
        if offset is not None and (None in (offset.axis, axis) or offset.axis == axis):
            sums, whole = inner.inputs[0], whole + offset.vector
            axis = axis if axis is not None else offset.axis
            break
    if (np.abs(whole) >= LARGEST_BIAS).any():
        return RuleRefusal("the bias is large", root.output)
    if _bound(view, sums) + np.abs(whole).max(initial=0) >= 1 << 31:
        return RuleRefusal("the sum with the bias may not fit 32 bits", root.output)

    def write(writer: Writer) -> int:
        type_, total = writer.type(root.output), sums
        if np.any(whole):
            total = writer.add("add", (sums, writer.along(whole, axis or 0, ValueType(type_.shape, DType.I32))))
        result = writer.add("cast", (total,), CastAttributes(type_.dtype.value))
        return writer.add("mul", (result, match.values["scale"]))

    return write


BIAS_JOINS_INTEGER_SUMS = Rule(
    name="bias-joins-integer-sums",
    law="s a + b = s (a + b/s), where b/s is a whole number",
    source="distributivity; biases are quantized with the product of both scales",
    roots=("add",),
    match=stands(op("add", _SCALED, "bias"), _is_sum),
    rewrite=_join_bias,
    reorders=True,
)


def _compose_scales(view: View, match: Found) -> Write | RuleRefusal:
    root = match.root
    first, second = axis_constant(view, match.values["scale"]), axis_constant(view, match.values["factor"])
    if first is None or second is None or (None not in (first.axis, second.axis) and first.axis != second.axis):
        return RuleRefusal("the scales vary along different axes", root.output)
    with np.errstate(all="ignore"):
        vector = first.vector / second.vector if root.op == "div" else first.vector * second.vector
    if not _is_normal(np.abs(vector)):
        return RuleRefusal("a product of scales is no normal number", root.output)
    axis = first.axis if first.axis is not None else second.axis

    def write(writer: Writer) -> int:
        factor = writer.along(vector, axis or 0, writer.type(root.output))
        return writer.add("mul", (match.primitives["float"].output, factor))

    return write


SCALES_OF_SUMS_COMPOSE = Rule(
    name="scales-of-sums-compose",
    law="(s a) / t = (s/t) a, of a sum a of 32 bits",
    source="the requantization of Jacob et al. (CVPR 2018), section 2.2",
    roots=("div", "mul"),
    match=stands(op("mul|div", _SCALED, "factor"), _is_sum),
    rewrite=_compose_scales,
    reorders=True,
)


@dataclass(frozen=True, slots=True)
class StoredMatch:
    """An operand of a product that is computed from constants stored in fewer bytes."""

    root: Primitive
    position: int
    steps: tuple[Primitive, ...]


def _match_stored(view: View, root: Primitive) -> Iterator[StoredMatch]:
    for position, value in enumerate(root.inputs):
        steps: dict[int, Primitive] = {}
        if view.constant(value) is None and _follow(view, value, steps, STEPS):
            ordered = tuple(dict.fromkeys(steps.values()))
            if any(step.op == "cast" for step in ordered):
                yield StoredMatch(root, position, ordered)


def _follow(view: View, value: int, steps: dict[int, Primitive], depth: int) -> bool:
    """Collect the elementwise, layout and broadcast steps from constants to a value; return whether these suffice."""
    if value in steps or view.constant(value) is not None:
        return True
    makers = view.producing(value)
    if not makers or depth == 0:
        return False
    maker = makers[0]
    is_plain = maker.row.category in (Category.ELEMENTWISE, Category.LAYOUT, Category.BROADCAST)
    if not is_plain or not all(_follow(view, v, steps, depth - 1) for v in maker.inputs):
        return False
    steps[value] = maker
    return True


def _compute(view: View, match: StoredMatch) -> Write | RuleRefusal:
    root, value = match.root, match.root.inputs[match.position]
    if view.type(value).size_bytes > LARGEST_BYTES:
        return RuleRefusal("the constant is too large to compute", root.output, is_final=True)
    array = _computed(view, match.steps, value)

    def write(writer: Writer) -> int:
        inputs = list(root.inputs)
        inputs[match.position] = writer.constant(array, writer.type(value).dtype)
        return writer.add(root.op, inputs, root.attributes)

    return write


def _computed(view: View, steps: Iterable[Primitive], value: int) -> Array:
    """Return the value that the given steps, in order, compute from constants."""
    arrays: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for step in steps:
            for v in step.inputs:
                constant = view.constant(v)
                if constant is not None:
                    arrays.setdefault(v, constant.array)
            result = step.row.reference([arrays[v] for v in step.inputs], step.attributes)
            arrays[step.output] = result.astype(view.type(step.output).dtype.numpy, copy=False)
    return arrays[value]


def stored_array(view: View, value: int) -> Array | None:
    """Return the elements of a value that is computed from constants, None if it is not or if it is too large."""
    constant, steps = view.constant(value), dict[int, Primitive]()
    if constant is not None:
        return constant.array
    if view.type(value).size_bytes > LARGEST_BYTES or not _follow(view, value, steps, STEPS):
        return None
    return _computed(view, dict.fromkeys(steps.values()), value)


STORED_WEIGHTS_ARE_COMPUTED_ONCE = Rule(
    name="stored-weights-are-computed-once",
    law="x * f(w) = x * v for a constant w, where v = f(w) takes more bytes",
    source="constant folding",
    roots=LINEAR,
    match=_match_stored,
    rewrite=_compute,
)

RULES: tuple[AnyRule, ...] = (
    PRODUCT_OF_DEQUANTIZED_IS_INTEGER,
    BIAS_JOINS_INTEGER_SUMS,
    SCALES_OF_SUMS_COMPOSE,
    STORED_WEIGHTS_ARE_COMPUTED_ONCE,
)
