"""Fission of Conv, MatMul, Gemm and Einsum; a bias becomes a separate addition."""

import math

from korch.fission.context import Context
from korch.fission.gathered import gathered_product
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.fission.window import window_of
from korch.primitive.ops.linear import ConvAttributes, MatmulAttributes
from korch.primitive.types import ValueId
from korch.primitive.verbs import Shape, lit


def kernel_of(c: Context, w: ValueId) -> Shape:
    """Return the window of the weights, which the attribute kernel_shape must not contradict."""
    kernel = c.shape(w)[2:]
    declared = c.attributes.integers("kernel_shape", kernel)
    if declared != kernel:
        raise ValueError(f"kernel_shape is {declared}, the weights have {kernel}")
    return kernel


def add_bias(c: Context, y: ValueId) -> ValueId:
    """Return the sum of an image and the bias of its channels, the optional third input."""
    bias = c.optional(2)
    if bias is None:
        return y
    shape = (1, c.shape(bias)[0], *(1,) * (c.rank(y) - 2))
    return c.elementwise("add", y, c.reshape(bias, shape))


def conv_attributes(c: Context, x: ValueId, w: ValueId) -> ConvAttributes:
    """Return the attributes of the primitive that convolves x with w."""
    if not c.rank(x) > 2:
        raise NotSplitError("no spatial axis")
    window = window_of(c, kernel_of(c, w))
    if min((*window.pads_begin, *window.pads_end)) < 0:
        raise NotSplitError("negative pads")
    return ConvAttributes(
        window.strides, window.pads_begin, window.pads_end, window.dilations, c.attributes.integer("group", 1)
    )


def _conv(c: Context) -> Result:
    x, w = c.inputs[:2]
    return add_bias(c, c.add("conv", x, w, attributes=conv_attributes(c, x, w)))


def matrices(c: Context, a: ValueId, b: ValueId) -> tuple[ValueId, ValueId]:
    """Return the operands of a product as matrices of equal rank, with leading axes of size 1 where needed."""
    a = c.reshape(a, (1, *c.shape(a))) if c.rank(a) == 1 else a
    b = c.reshape(b, (*c.shape(b), 1)) if c.rank(b) == 1 else b
    rank = max(c.rank(a), c.rank(b))
    return tuple(c.reshape(v, (1,) * (rank - c.rank(v)) + c.shape(v)) for v in (a, b))  # type: ignore[return-value]


def _matmul(c: Context) -> Result:
    a, b = matrices(c, *c.inputs)
    product = gathered_product(c, a, b)
    if product is None:
        attributes = MatmulAttributes(c.attributes.rounded_block)
        product = c.add("matmul", a, b, attributes=attributes)
    return c.reshape(product, c.output_type().shape)


def _gemm(c: Context) -> Result:
    a, b = c.inputs[:2]
    a = c.transpose(a, (1, 0)) if c.attributes.integer("transA", 0) else a
    b = c.transpose(b, (1, 0)) if c.attributes.integer("transB", 0) else b
    alpha, beta = c.attributes.number("alpha", 1.0), c.attributes.number("beta", 1.0)
    if not c.is_float(a) and (alpha, beta) != (1.0, 1.0):
        raise NotSplitError("integers, with factors that are real")
    y = c.add("matmul", a, b)
    y = y if alpha == 1 else c.elementwise("mul", y, lit(alpha))
    addend = c.optional(2)
    if addend is None or beta == 0:
        return y
    addend = addend if beta == 1 else c.elementwise("mul", addend, lit(beta))
    return c.elementwise("add", y, addend)


def _einsum(c: Context) -> Result:
    """One operand as a sum and a transpose, or two operands as one batched matrix product."""
    equation = c.attributes.text("equation").replace(" ", "")
    if "." in equation or len(c.inputs) not in (1, 2):
        raise NotSplitError("an ellipsis, or more than two operands")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        joined = left.replace(",", "")
        out = "".join(sorted(x for x in set(joined) if joined.count(x) == 1))
    if any(len(set(term)) != len(term) for term in (*terms, out)):
        raise NotSplitError("a diagonal")
    if len(terms) == 1:
        return _sum_out(c, c.input(0), terms[0], out)
    sizes = {
        letter: n
        for term, value in zip(terms, c.inputs, strict=True)
        for letter, n in zip(term, c.shape(value), strict=True)
    }
    broadcasts = any(
        c.shape(value) != tuple(sizes[x] for x in term) for term, value in zip(terms, c.inputs, strict=True)
    )
    if broadcasts:
        raise NotSplitError("an axis that broadcasts")
    values, letters = [], []
    for position, value in enumerate(c.inputs):
        keep = "".join(x for x in terms[position] if x in out or x in terms[1 - position])
        values.append(_sum_out(c, value, terms[position], keep))
        letters.append(keep)
    batch = [x for x in letters[0] if x in letters[1] and x in out]
    inner = [x for x in letters[0] if x in letters[1] and x not in out]
    rows = [x for x in letters[0] if x not in letters[1]]
    columns = [x for x in letters[1] if x not in letters[0]]

    def size(names: list[str]) -> int:
        return math.prod(sizes[x] for x in names)

    a = c.transpose(values[0], [letters[0].index(x) for x in (*batch, *rows, *inner)])
    b = c.transpose(values[1], [letters[1].index(x) for x in (*batch, *inner, *columns)])
    lead = tuple(sizes[x] for x in batch)
    product = c.add(
        "matmul", c.reshape(a, (*lead, size(rows), size(inner))), c.reshape(b, (*lead, size(inner), size(columns)))
    )
    order = [*batch, *rows, *columns]
    whole = c.reshape(c.cast(product, c.dtype(c.input(0))), [sizes[x] for x in order])  # sums of bytes wrap around
    return c.transpose(whole, [order.index(x) for x in out])


def _sum_out(c: Context, value: ValueId, term: str, out: str) -> ValueId:
    """Sum over the axes that `out` does not name, and put the others in the order of `out`."""
    axes = tuple(i for i, x in enumerate(term) if x not in out)
    rest = [x for x in term if x in out]
    value = c.reduce("sum", value, axes)
    value = c.reshape(value, [n for i, n in enumerate(c.shape(value)) if i not in axes])
    return c.transpose(value, [rest.index(x) for x in out if x in rest])


RULES: tuple[FissionRule, ...] = (
    FissionRule("Conv", _conv),
    FissionRule("MatMul", _matmul, 9),
    FissionRule("Gemm", _gemm),
    FissionRule("Einsum", _einsum, 12),
)
