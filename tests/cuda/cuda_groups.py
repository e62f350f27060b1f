"""Groups with linear primitives, for tests in the interpreter and on a device."""

from functools import partial

from korch.candidate.candidate import Group
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.winograd import WinogradAttributes
from korch.primitive.types import ValueType
from tests.tile.tile_groups import Graph


def product(a: str, b: str) -> Group:
    g = Graph()
    return g.group(g.add("matmul", [g.tensor(a), g.tensor(b)]))


def conv(x: str, w: str, strides=(1, 1), begin=(0, 0), end=(0, 0), dilations=(1, 1), groups=1, tail=False) -> Group:
    g = Graph()
    attributes = ConvAttributes(strides, begin, end, dilations, groups)
    y = g.add("conv", [g.tensor(x), g.tensor(w)], attributes)
    if tail:
        shape = g.shape(y)
        y = g.add("add", [y, g.wide(g.tensor(f"f32[1,{shape[1]},1,1]"), shape)])
        y = g.add("max", [y, g.number(y, 0.0)])
        y = g.add("add", [y, g.tensor(f"f32{list(shape)}")])
    return g.group(y)


def attention(
    heads: int,
    m: int,
    n: int,
    d: int,
    e: int,
    masked: bool = False,
    kind: str = "f32",
    guarded: bool = False,
    between: str = "",
) -> Group:
    """Attention; what is between the products may have another type than these."""
    g, between = Graph(), between or kind
    q, k, v = (g.tensor(f"{kind}[{heads},{rows},{width}]") for rows, width in ((m, d), (n, d), (n, e)))
    s = g.add("matmul", [q, g.transpose(k, 0, 2, 1)])
    s = s if between == kind else g.cast(s, between)
    s = g.add("mul", [s, g.number(s, d**-0.5)])
    if masked:
        s = g.add("add", [s, g.wide(g.tensor(f"{between}[1,1,{n}]"), g.shape(s))])
    p = g.add("exp", [g.add("sub", [s, g.wide(g.reduce("max", s, 2), g.shape(s))])])
    p = g.add("div", [p, g.wide(g.reduce("sum", p, 2), g.shape(s))])
    p = g.add("where", [g.add("isnan", [p]), g.number(p, 0.0), p]) if guarded else p
    y = g.add("matmul", [p if between == kind else g.cast(p, kind), v])
    y = g.reshape(g.transpose(y, 1, 0, 2), m, heads * e)
    return g.group(y if between == kind else g.cast(y, between))


def fused_product() -> Group:
    """What comes before is moved and computed; two outputs, one of them moved."""
    g = Graph()
    x, w = g.tensor("f32[1,4,8,10]"), g.tensor("f32[32,48]")
    rows = g.reshape(g.transpose(x, 0, 2, 1, 3), 8, 40)
    rows = g.add("sigmoid", [g.slice(rows, (0, 4), (8, 32), (1, 1))])
    y = g.add("matmul", [rows, w])
    y = g.add("tanh", [g.add("add", [y, g.wide(g.tensor("f32[48]"), (8, 48))])])
    return g.group(g.transpose(g.reshape(y, 8, 4, 12), 1, 0, 2), y)


def fused_conv() -> Group:
    """A reflecting pad of a function before the convolution, and zero pads of its own."""
    g = Graph()
    x = g.pad(g.add("exp", [g.tensor("f32[1,8,6,6]")]), (0, 0, 1, 1), (0, 0, 1, 1), "reflect")
    attributes = ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1))
    return g.group(g.add("conv", [x, g.tensor("f32[16,8,3,3]")], attributes))


def winograd(tile: int, shape: tuple[int, ...], channels: int, begin: tuple[int, int], end: tuple[int, int]) -> Group:
    g = Graph()
    x = g.input("x0", ValueType.parse(f"f32{list(shape)}"))
    u = g.tensor(f"f32[{tile + 2},{tile + 2},{shape[1]},{channels}]")
    x = g.add("max", [x, g.number(x, 0.0)])
    y = g.add("winograd", [x, u], WinogradAttributes(tile, begin, end))
    y = g.add("add", [y, g.wide(g.tensor(f"f32[1,{channels},1,1]"), g.shape(y))])
    return g.group(g.add("neg", [y]))


PRODUCTS = {
    "matrices": partial(product, "f32[33,20]", "f32[20,40]"),
    "one right matrix": partial(product, "f32[2,3,17,8]", "f32[1,1,8,40]"),
    "batches": partial(product, "f32[2,9,70]", "f32[2,70,33]"),
    "broadcast batches": partial(product, "f32[3,1,30,9]", "f32[1,2,9,24]"),
    "many terms": partial(product, "f32[16,300]", "f32[300,16]"),
    "one row": partial(product, "f32[1,5]", "f32[5,64]"),
    "one term": partial(product, "f32[64,1]", "f32[1,64]"),
    "float16": partial(product, "f16[40,64]", "f16[64,24]"),
    "bfloat16": partial(product, "bf16[40,64]", "bf16[64,24]"),
    "asymmetric": partial(conv, "f32[1,8,9,11]", "f32[16,8,3,3]", (2, 1), (1, 0), (0, 2), (1, 2)),
    "stem": partial(conv, "f32[2,3,10,9]", "f32[24,3,3,3]", (2, 2), (1, 1), (1, 1), tail=True),
    "pointwise": partial(conv, "f32[1,16,6,7]", "f32[32,16,1,1]", tail=True),
    "depthwise": partial(conv, "f32[1,16,8,6]", "f32[16,1,3,3]", (1, 1), (1, 1), (1, 1), groups=16, tail=True),
    "grouped": partial(conv, "f32[1,16,8,6]", "f32[32,8,3,3]", (1, 1), (1, 1), (1, 1), groups=2),
    "whole window": partial(conv, "f32[1,2,5,5]", "f32[3,2,5,5]"),
    "half convolution": partial(conv, "f16[1,16,6,7]", "f16[24,16,3,3]", (1, 1), (1, 1), (1, 1)),
    "fused product": fused_product,
    "fused convolution": fused_conv,
}

IN_LIBRARY = frozenset(
    (
        "matrices",
        "one right matrix",
        "batches",
        "broadcast batches",
        "many terms",
        "one row",
        "one term",
        "float16",
        "bfloat16",
        "asymmetric",
        "grouped",
        "whole window",
        "half convolution",
    )
)

ATTENTIONS = {
    "short last block": partial(attention, 2, 33, 70, 16, 16),
    "small": partial(attention, 1, 8, 8, 20, 24),
    "masked": partial(attention, 3, 16, 130, 8, 40, True),
    "one row": partial(attention, 2, 1, 19, 8, 5, True),
    "two keys of one term": partial(attention, 1, 3, 2, 1, 1),
    "guarded": partial(attention, 2, 33, 70, 16, 16, True, guarded=True),
    "float16": partial(attention, 2, 40, 40, 16, 16, kind="f16"),
    "products of float16": partial(attention, 2, 33, 70, 16, 24, True, "f16", True, between="f32"),
    "products of bfloat16": partial(attention, 2, 33, 70, 16, 24, True, "bf16", between="f32"),
}

WINOGRADS = {
    f"{tile} {name}": partial(winograd, tile, *arguments)
    for tile in (2, 4)
    for name, arguments in (
        ("odd", ((1, 16, 13, 15), 24, (1, 1), (1, 1))),
        ("two images", ((2, 8, 6, 6), 16, (1, 0), (0, 1))),
    )
}
