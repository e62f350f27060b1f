"""Groups for tests of lowering and printing, and the reference results for both."""

from collections.abc import Iterator, Sequence

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal, make_group
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.generated import GeneratedProvider
from korch.target import Target
from korch.testing.tolerance import assert_same
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import TileProgram
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.support.random_graph import random_graph

MODES = ("constant", "reflect", "edge", "wrap")


def offers_of(group: Group, target: Target) -> Sequence[Offer]:
    offers = GeneratedProvider().offer(group, target)
    assert not isinstance(offers, Refusal), offers
    return offers


def lowered(group: Group, offer: Offer, target: Target) -> TileProgram:
    machine = Machine.of(target)
    program = lower(group.body, offer.inputs, offer.outputs, machine)
    assert check_program(program) == (), program
    return program


def check_lowering(group: Group, offer: Offer, target: Target, inputs: Sequence[Array]) -> None:
    """Interpret the tile program of an offer and compare with the primitives, in their types."""
    packed = [layout.pack(a) for layout, a in zip(offer.inputs, inputs, strict=True)]
    results = run_program(lowered(group, offer, target), packed)
    feeds = {name: array for (name, _), array in zip(group.body.inputs, inputs, strict=True)}
    expected = reference.run(group.body, feeds, exact=True)
    for (name, value), layout, flat in zip(group.body.outputs, offer.outputs, results, strict=True):
        shape = group.body.types[value].shape
        terms = max([1, *(t.size for t in group.body.types)])
        assert_same(layout.unpack(flat, shape), expected[name], terms=terms, name=name)


def whole(graph: PrimitiveGraph) -> Group:
    outputs = list(dict.fromkeys(value for _, value in graph.outputs))
    return make_group(graph, range(len(graph.primitives)), outputs)


class Graph(GraphBuilder):
    """A builder with short words for tests."""

    def tensor(self, text: str) -> int:
        return self.input(f"x{len(self._inputs)}", ValueType.parse(text))

    @staticmethod
    def type_of(kind: str) -> type[np.generic]:
        """Return NumPy's name for an element type."""
        return DType(kind).numpy.type

    def shape(self, value: int) -> tuple[int, ...]:
        return self.type(value).shape

    def number(self, value: int, number: float) -> int:
        kind = self.type(value).dtype.numpy
        return self.constant(np.broadcast_to(np.asarray(number, kind), self.shape(value)))

    def wide(self, value: int, shape: Sequence[int]) -> int:
        if self.shape(value) == tuple(shape):
            return value
        return self.add("broadcast", [value], BroadcastAttributes(tuple(shape)))

    def reduce(self, op: str, value: int, *axes: int) -> int:
        return self.add(f"reduce_{op}", [value], ReduceAttributes(axes))

    def mean(self, value: int, *axes: int) -> int:
        total = self.reduce("sum", value, *axes)
        count = self.type(value).size // max(1, self.type(total).size)
        return self.add("div", [total, self.number(total, count)])

    def pad(
        self, value: int, before: Sequence[int], after: Sequence[int], mode: str = "constant", fill: float = 0.0
    ) -> int:
        return self.add("pad", [value], PadAttributes(tuple(before), tuple(after), mode, fill))

    def take(self, value: int, axis: int, indices: Sequence[int]) -> int:
        return self.add("take", [value], TakeAttributes(axis, tuple(map(int, indices))))

    def slice(self, value: int, start: Sequence[int], size: Sequence[int], step: Sequence[int]) -> int:
        attributes = SliceAttributes(tuple(start), tuple(size), tuple(step))
        return self.add("slice", [value], attributes)

    def transpose(self, value: int, *perm: int) -> int:
        return self.add("transpose", [value], TransposeAttributes(perm))

    def reshape(self, value: int, *shape: int) -> int:
        return self.add("reshape", [value], ReshapeAttributes(shape))

    def concat(self, axis: int, *values: int) -> int:
        return self.add("concat", values, ConcatAttributes(axis))

    def cast(self, value: int, to: str) -> int:
        return self.add("cast", [value], CastAttributes(to))

    def pool(self, op: str, value: int, *window: tuple[int, ...]) -> int:
        return self.add(f"pool_{op}", [value], PoolAttributes(*window))

    def group(self, *outputs: int) -> Group:
        for i, value in enumerate(outputs):
            self.output(f"o{i}", value)
        return whole(self.freeze())


def softmax(text: str, axis: int, masked: bool = False) -> Group:
    g = Graph()
    x = g.tensor(text)
    if masked:
        mask = g.tensor(f"f32{[1] * (len(g.shape(x)) - 2) + list(g.shape(x)[-2:])}")
        x = g.add("add", [x, g.wide(mask, g.shape(x))])
    shape = g.shape(x)
    top = g.wide(g.reduce("max", x, axis), shape)
    e = g.add("exp", [g.add("sub", [x, top])])
    return g.group(g.add("div", [e, g.wide(g.reduce("sum", e, axis), shape)]))


def normalization(text: str, axes: Sequence[int], affine: Sequence[int] = (), tail: str = "") -> Group:
    """Layer, instance and group normalization; with ReLU and a reflecting pad if asked."""
    g = Graph()
    x = g.tensor(text)
    shape = g.shape(x)
    d = g.add("sub", [x, g.wide(g.mean(x, *axes), shape)])
    variance = g.mean(g.add("mul", [d, d]), *axes)
    deviation = g.add("sqrt", [g.add("add", [variance, g.number(variance, 1e-5)])])
    y = g.add("div", [d, g.wide(deviation, shape)])
    if affine:
        small = f"f32{[n if a in affine else 1 for a, n in enumerate(shape)]}"
        y = g.add("mul", [y, g.wide(g.tensor(small), shape)])
        y = g.add("add", [y, g.wide(g.tensor(small), shape)])
    if tail == "relu":
        y = g.add("max", [y, g.number(y, 0.0)])
    if tail == "grow":  # as in style transfer: upsample by 2 and reflect
        for axis in (2, 3):
            y = g.take(y, axis, np.repeat(np.arange(g.shape(y)[axis]), 2))
        y = g.pad(y, (0, 0, 1, 1), (0, 0, 1, 1), "reflect")
    return g.group(y)


def pads() -> Iterator[Group]:
    """Every mode along every axis, small and larger than the tensor: all pairs of these, and all on the last axis."""
    sizes = ((1, 2), (0, 3), (2, 0), (5, 7))
    for m, mode in enumerate(MODES):
        for axis in range(4):
            for before, after in sizes if axis == 3 else (sizes[(m + axis) % 4],):
                g = Graph()
                x = g.tensor("f32[2,3,4,18]" if axis == 3 else "f32[2,3,4,5]")
                sides = [tuple(n if a == axis else 0 for a in range(4)) for n in (before, after)]
                yield g.group(g.add("neg", [g.pad(x, *sides, mode, 1.5 * (mode == "constant"))]))


def moves() -> Iterator[Group]:
    """Concatenations, takes, slices, transposes and reshapes, alone and chained."""
    for axis, sizes in ((0, "1 2 3"), (1, "16 3 2"), (2, "3 1"), (3, "17 2 30")):
        g = Graph()
        shape = [2, 4, 3, 20]
        parts = []
        for n in map(int, sizes.split()):
            shape[axis] = n
            parts.append(g.tensor(f"f32{shape}"))
        yield g.group(g.concat(axis, g.add("exp", [parts[0]]), *parts[1:]))
    for axis in range(3):
        g = Graph()
        x = g.tensor("f32[4,6,19]")
        yield g.group(g.take(x, axis, [1, 0, 3, 3, 2, 0, 1] * 3))
        for step in (1, 2, 3, -1, -2):
            g = Graph()
            x = g.tensor("f32[6,7,40]")
            n = g.shape(x)[axis]
            size = (n - 1) // abs(step)
            start = 1 if step > 0 else n - 1
            sizes = tuple(size if a == axis else m for a, m in enumerate(g.shape(x)))
            begin, steps = [0, 0, 0], [1, 1, 1]
            begin[axis], steps[axis] = start, step
            sizes = tuple(
                min(m, (n - 1 - start) // step + 1 if step > 0 else m) if a == axis else m for a, m in enumerate(sizes)
            )
            yield g.group(g.slice(x, begin, sizes, steps))
    for perm in ((0, 2, 3, 1), (3, 1, 2, 0), (1, 0, 2, 3), (0, 1, 3, 2)):
        g = Graph()
        x = g.transpose(g.tensor("f32[2,16,5,6]"), *perm)
        yield g.group(g.add("tanh", [x]))
    g = Graph()
    x = g.reshape(g.tensor("f32[2,12,3,10]"), 2, 3, 4, 30)
    yield g.group(g.reshape(g.transpose(x, 0, 2, 1, 3), 2, 12, 3, 10))
    g = Graph()
    x = g.slice(g.reshape(g.pad(g.tensor("f32[5,7]"), (1, 0), (0, 2)), 9, 6), (8, 5), (4, 3), (-2, -2))
    yield g.group(g.take(x, 0, [3, 0, 0, 2]))


def squares() -> Iterator[Group]:
    """Transposes larger and smaller than registers, cut into tiles, aliased, and with guards."""
    for text in (
        "f32[3,4]",
        "f32[4,3]",
        "f32[5,7]",
        "f32[16,16]",
        "f32[17,33]",
        "f32[4,90]",
        "f32[90,4]",
        "f32[130,90]",
        "f32[37,300]",
        "f32[256,53]",
        "f32[53,256]",
        "i32[19,21]",
        "f64[18,19]",
        "f16[18,19]",
        "u8[18,19]",
    ):
        g = Graph()
        yield g.group(g.transpose(g.tensor(text), 1, 0))
    for perm in ((0, 2, 3, 1), (0, 3, 1, 2), (2, 1, 0, 3), (3, 2, 1, 0)):
        g = Graph()
        x = g.tensor("f32[3,23,6,20]")
        y = g.transpose(x, *perm)
        small = g.wide(g.tensor(f"f32[{g.shape(y)[-1]}]"), g.shape(y))
        yield g.group(g.add("mul", [g.add("add", [y, small]), g.tensor(f"f32{[*g.shape(y)]}")]))
    for before, after in (((2, 0), (3, 0)), ((0, 2), (0, 3)), ((1, 1), (1, 1))):
        g = Graph()
        x = g.transpose(g.tensor("f32[21,38]"), 1, 0)
        yield g.group(g.pad(x, before, after, fill=2.0), g.pad(x, before, after, "reflect"))
    for axis in (0, 1):
        g = Graph()
        shapes = ("f32[20,18]", "f32[5,18]") if axis else ("f32[18,20]", "f32[18,5]")
        yield g.group(g.concat(axis, *(g.transpose(g.tensor(s), 1, 0) for s in shapes)))
    g = Graph()
    x = g.tensor("f32[24,70]")
    first, second = g.slice(x, (1, 2), (20, 20), (1, 1)), g.slice(x, (0, 30), (20, 20), (1, 2))
    yield g.group(
        g.add("sub", [g.transpose(first, 1, 0), g.transpose(second, 1, 0)]),
        g.add("sub", [g.transpose(second, 1, 0), first]),
    )


def pools() -> Iterator[Group]:
    """Windows with pads, strides and dilations, of one to three axes; every other one with both operations."""
    for i, (text, window) in enumerate(
        (
            ("f32[1,16,9,11]", ((3, 3), (2, 1), (1, 1), (1, 0), (1, 1))),
            ("f32[2,3,7,40]", ((3, 2), (1, 2), (2, 1), (0, 1), (2, 3))),
            ("f32[1,2,50]", ((5,), (3,), (2,), (4,), (1,))),
            ("f32[1,3,5,6,7]", ((2, 3, 2), (1, 2, 3), (1, 0, 1), (0, 1, 1), (1, 1, 2))),
            ("f32[1,16,6,6]", ((1, 1), (2, 2), (0, 0), (0, 0), (1, 1))),
            ("f32[3,4]", ((4,), (1,), (0,), (0,), (1,))),
            ("f32[1,96,9,11]", ((5, 5), (1, 1), (2, 2), (2, 2), (1, 1))),
            ("f32[2,16,13,20]", ((5, 3), (1, 1), (2, 1), (2, 1), (1, 1))),
            ("f32[1,3,40,39]", ((3, 3), (2, 2), (1, 1), (1, 1), (1, 1))),
            ("f32[1,2,3,70]", ((1, 2), (1, 2), (0, 0), (0, 0), (1, 1))),
            ("f32[2,3,5,33]", ((2, 2), (1, 1), (3, 4), (4, 3), (1, 1))),  # windows of pads only
            ("f32[4,300]", ((90,), (1,), (60,), (20,), (2,))),
            ("f32[1,3,4]", ((1,), (4,), (0,), (0,), (1,))),
            ("f32[1,3,2,13]", ((1, 1), (3, 3), (0, 1), (2, 0), (1, 2))),
        )
    ):
        for op in ("sum", "max") if i % 2 == 0 else (("sum", "max")[i // 2 % 2],):
            g = Graph()
            yield g.group(g.pool(op, g.add("neg", [g.tensor(text)]), *window))
    for fill in (0.0, 5.0):
        g = Graph()
        padded = g.pad(g.tensor("f32[1,16,7,9]"), (0, 0, 1, 0), (0, 0, 0, 2), fill=fill)
        yield g.group(g.pool("max", padded, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)))
    for text in ("f32[1,32,9,11]", "f32[1,96,5,40]"):
        g = Graph()
        row = g.pool("max", g.tensor(text), (1, 5), (1, 1), (0, 2), (0, 2), (1, 1))
        yield g.group(row, g.pool("max", row, (5, 1), (1, 1), (2, 0), (2, 0), (1, 1)))


def detections() -> Iterator[Group]:
    """Heads of a detector: boxes, scores and classes of several scales, one after another."""
    for classes, sizes, last in ((80, (9, 5, 4), True), (11, (6, 2), False), (3, (17, 1), True)):
        g = Graph()
        scales = []
        for n in sizes:
            boxes = g.slice(g.tensor(f"f32[1,5,{n},{n}]"), (0, 0, 0, 0), (1, 4, n, n), (1,) * 4)
            boxes = g.add("add", [boxes, g.wide(g.tensor("f32[1,4,1,1]"), g.shape(boxes))])
            others = g.tensor(f"f32[1,1,{n},{n}]"), g.tensor(f"f32[1,{classes},{n},{n}]")
            scales.append(g.reshape(g.concat(1, boxes, *others), 1, 5 + classes, n * n))
        y = g.concat(2, *scales)
        yield g.group(g.transpose(y, 0, 2, 1) if last else y)
    for axis in (0, 1):  # parts of one element, of two sources that are one, and a border
        g = Graph()
        x, one = g.tensor("f32[19,37]"), g.tensor("f32[1,37]" if axis == 0 else "f32[19,1]")
        y = g.concat(axis, one, g.transpose(g.tensor("f32[37,19]"), 1, 0), one, g.add("neg", [x]))
        yield g.group(g.pad(y, (1, 2), (2, 1), fill=3.0))


def short_rows() -> Iterator[Group]:
    """Windows that hang over rows on both sides, are longer than rows, and of other types."""
    for op, text, window in (
        ("max", "f32[1,80,13,13]", ((5, 5), (1, 1), (2, 2), (2, 2), (1, 1))),
        ("sum", "f32[1,32,5,6]", ((9, 9), (1, 1), (4, 4), (4, 4), (1, 1))),
        ("max", "f32[2,40,12,7]", ((4, 6), (2, 2), (3, 0), (0, 5), (1, 2))),
        ("max", "f32[3,17,2,3]", ((1, 3), (1, 1), (1, 1), (0, 1), (1, 1))),
        ("max", "f16[1,24,9,13]", ((5, 5), (1, 1), (2, 2), (2, 2), (1, 1))),
        ("max", "i32[1,3,9,13]", ((5, 5), (1, 1), (2, 2), (2, 2), (1, 1))),
        ("sum", "f64[1,3,9,13]", ((5, 5), (1, 1), (2, 2), (2, 2), (1, 1))),
    ):
        g = Graph()
        yield g.group(g.pool(op, g.tensor(text), *window))


def resizes() -> Iterator[Group]:
    """Elements repeated by whole and broken factors, left out, and mixed with their neighbours."""
    for text, factor in (
        ("f32[1,2,5,40]", 2),
        ("f32[1,16,3,7]", 3),
        ("f32[2,3,4,33]", 1.5),
        ("f32[1,1,3,3]", 7),
        ("i32[1,2,3,20]", 2),
        ("f64[1,2,3,20]", 2),
        ("f16[1,2,3,20]", 2),
        ("f32[1,2,3,70]", 0.4),
    ):
        g = Graph()
        y = g.tensor(text)
        for axis in (2, 3):
            n = g.shape(y)[axis]
            y = g.take(y, axis, [int(i / factor) for i in range(int(n * factor))])
        yield g.group(y)
    for text in ("f32[1,2,5,40]", "f32[2,32,4,9]"):
        g = Graph()
        y = g.tensor(text)
        for axis in (2, 3):
            n = g.shape(y)[axis]
            place = np.clip((np.arange(2 * n) + 0.5) / 2 - 0.5, 0, n - 1)
            low = np.floor(place).astype(int)
            a, b = g.take(y, axis, low), g.take(y, axis, np.minimum(low + 1, n - 1))
            y = g.add("add", [g.add("mul", [a, g.number(a, 0.25)]), b])
        yield g.group(y, g.take(y, 3, (*range(g.shape(y)[3]), 0, 3, 1)))


def reductions() -> Iterator[Group]:
    for op in ("sum", "prod", "max", "min"):
        for text, axes in (
            ("f32[3,5,40]", (2,)),
            ("f32[3,40,5]", (1,)),
            ("f32[40,3,32]", (0,)),
            ("f32[3,5,7]", (0, 2)),
            ("f32[6]", (0,)),
            ("f32[2,3,5,7,2]", (1, 3)),
            ("f32[1,300]", (1,)),
            ("f32[3,1,4]", (1,)),
            ("f64[5,9]", (1,)),
            ("i32[5,30]", (1,)),
            ("i64[5,30]", (0,)),
            ("u8[3,33]", (1,)),
            ("f32[2,0,3]", (1,)),
        ):
            if "0" in text.split(",") and op in ("max", "min"):
                continue
            g = Graph()
            yield g.group(g.reduce(op, g.tensor(text), *axes))


def several_outputs() -> Iterator[Group]:
    g = Graph()
    x = g.tensor("f32[2,16,5,6]")
    y = g.add("exp", [x])
    yield g.group(y, g.add("add", [y, x]))
    g = Graph()
    x = g.tensor("f32[4,70]")
    total = g.reduce("sum", x, 1)
    yield g.group(total, g.add("sub", [x, g.wide(total, (4, 70))]))
    g = Graph()
    x = g.tensor("f32[4,70]")
    yield g.group(g.reduce("max", x, 1), g.reduce("sum", g.add("tanh", [x]), 1))
    g = Graph()
    x = g.tensor("f32[6,10]")
    yield g.group(g.transpose(x, 1, 0), g.reduce("sum", x, 0), g.add("less", [x, g.number(x, 0)]))


def odd_shapes() -> Iterator[Group]:
    for text in ("f32[]", "f32[1]", "f32[1,1,1]", "f32[0]", "f32[3,0,2]", "f32[17]", "f32[1,2,3,4,5]", "f32[3,1,33,1]"):
        g = Graph()
        x = g.tensor(text)
        yield g.group(g.add("mul", [g.add("tanh", [x]), g.number(x, 2.0)]))
    g = Graph()
    x = g.tensor("f32[3]")
    yield g.group(g.wide(g.add("exp", [x]), (2, 0, 3)))
    g = Graph()
    yield g.group(g.concat(0, g.tensor("f32[2,3]"), g.tensor("f32[0,3]"), g.tensor("f32[1,3]")))
    g = Graph()
    yield g.group(g.pad(g.tensor("f32[0,3]"), (1, 0), (2, 1), fill=2.5))
    g = Graph()
    yield g.group(g.wide(g.reduce("sum", g.tensor("f32[2,0]"), 1), (2, 40)))
    g = Graph()
    yield g.group(g.add("neg", [g.tensor("f32[40000]")]))  # cut into ragged tiles
    g = Graph()
    yield g.group(g.add("neg", [g.transpose(g.tensor("f32[130,90]"), 1, 0)]))


def normalizations() -> Iterator[Group]:
    yield softmax("f32[2,4,8,33]", 3)
    yield softmax("f32[4,64]", 0)
    yield softmax("f32[3,5,7]", 1)
    yield softmax("f32[2,3,20,20]", 3, masked=True)
    yield normalization("f32[1,32,8,12]", (2, 3), (1,), "relu")
    yield normalization("f32[2,3,7,5]", (2, 3), (1,), "grow")
    yield normalization("f32[1,16,4,6]", (2, 3), (), "grow")
    yield normalization("f32[3,5,64]", (2,), (2,))
    yield normalization("f32[2,4,3,20]", (2, 3))
    yield normalization("f32[2,70]", (1,), (1,), "relu")


def random_groups(rng: np.random.Generator, count: int, primitives: int = 8) -> Iterator[Group]:
    while count:
        group = whole(random_graph(rng, int(rng.integers(2, primitives))))
        if group.primitives:
            count -= 1
            yield group


FAMILIES = {
    "pads": pads,
    "moves": moves,
    "squares": squares,
    "pools": pools,
    "resizes": resizes,
    "detections": detections,
    "short rows": short_rows,
    "reductions": reductions,
    "several outputs": several_outputs,
    "odd shapes": odd_shapes,
    "normalizations": normalizations,
}
