"""Converts the operands and results of linear primitives in a float32 graph to a 16-bit float type, or rounds operands.

Linear primitives read and write the 16-bit type (the half type), so matrix units can compute them.
Values that reach them through layout and broadcast primitives only are stored in it, too. Elementwise
primitives and reductions compute in float32, so sums and variances do not overflow, as in PyTorch's
autocast. The graph's inputs and outputs keep their types. Casts are elementwise and are fused into kernels.
"""

from dataclasses import replace

from korch.primitive.graph import Constant, GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.op import NONE, Category
from korch.primitive.ops.elementwise import CastAttributes, as_tf32
from korch.primitive.types import DType, ValueType
from korch.primitive.walks import reached

MOVES = (Category.LAYOUT, Category.BROADCAST)


def with_half(graph: PrimitiveGraph, half: DType) -> PrimitiveGraph:
    """Return a graph in which float32 linear primitives have a half type instead.

    `half`: float16 or bfloat16.
    """
    return _Conversion(graph, half).run()


def with_tf32(graph: PrimitiveGraph) -> PrimitiveGraph:
    """Return a graph in which the operands of float32 products and convolutions are rounded to TF32.

    Constants are rounded now, other values before the moves through which they reach a product, so that the kernel
    that computes them can store them rounded. Winograd convolutions keep their operands: they would amplify the errors.
    """
    types, constants = list(graph.types), dict(graph.constants)
    given = {value for _, value in graph.inputs}
    made: list[tuple[Primitive, str]] = []
    known: dict[int, int] = {}

    def rounded(value: int, origin: str) -> int:
        if graph.types[value].dtype is not DType.F32 or value in known:
            return known.get(value, value)
        types.append(graph.types[value])
        found = known[value] = len(types) - 1
        makers = [] if value in given else [graph.primitives[p] for p in graph.producers[value]]
        if value in constants:
            constants[found] = Constant.of(as_tf32(constants[value].array))
        elif makers and all(maker.row.category in MOVES for maker in makers):
            for maker in makers:
                inputs = tuple(rounded(v, origin) for v in maker.inputs)
                made.append((replace(maker, inputs=inputs, output=found), origin))
        else:
            made.append((Primitive("round_tf32", (value,), NONE, found), origin))
        return found

    for p, primitive in enumerate(graph.primitives):
        origin = graph.origins[p] if graph.origins else ""
        if primitive.op in ("matmul", "conv"):
            primitive = replace(primitive, inputs=tuple(rounded(value, origin) for value in primitive.inputs))
        made.append((primitive, origin))
    primitives, origins = zip(*made, strict=True) if made else ((), ())
    found = replace(graph, types=tuple(types), primitives=primitives, constants=constants, origins=origins)
    return GraphBuilder.from_graph(found).freeze()


class _Conversion:
    def __init__(self, graph: PrimitiveGraph, half: DType) -> None:
        self.graph = graph
        self.half = half
        self.types = list(graph.types)
        self.primitives: list[Primitive] = []
        self.origins: list[str] = []
        self.constants = dict(graph.constants)
        self.casts: dict[tuple[int, DType], int] = {}
        self.same: dict[int, int] = {}

    def run(self) -> PrimitiveGraph:
        graph = self.graph
        ends = {value for _, value in (*graph.inputs, *graph.outputs)}
        for value in self._narrow() - ends:
            self.types[value] = ValueType(graph.types[value].shape, self.half)
            if value in self.constants:
                array = graph.constants[value].array.astype(self.half.numpy)
                self.constants[value] = Constant.of(array)
        self.same = self._identities(ends)
        for p, primitive in enumerate(graph.primitives):
            if primitive.output in self.same:
                continue
            self._convert(primitive, graph.origins[p] if graph.origins else "")
        return replace(
            graph,
            types=tuple(self.types),
            primitives=tuple(self.primitives),
            constants=self.constants,
            origins=tuple(self.origins),
        )

    def _narrow(self) -> set[int]:
        """Return the float32 values that a linear primitive writes, or reads directly or through moves."""
        graph = self.graph

        def moved(value: int) -> list[int]:
            moves = (p for p in graph.producing(value) if p.row.category in MOVES)
            return [v for p in moves for v in p.inputs if graph.types[v].dtype is DType.F32]

        ends = (v for p in graph.linear for v in (*p.inputs, p.output) if graph.types[v].dtype is DType.F32)
        return set(reached(ends, moved))

    def _identities(self, ends: set[int]) -> dict[int, int]:
        """Return the results of casts whose operand now has the same type, each mapped to the operand."""
        graph, same = self.graph, dict[int, int]()
        for primitive in graph.primitives:
            value, output = primitive.inputs[0] if primitive.inputs else -1, primitive.output
            is_cast = primitive.op == "cast" and len(graph.producers[output]) == 1 and output not in ends
            if is_cast and self.types[value].dtype is self.types[output].dtype:
                same[output] = value
        return same

    def _convert(self, primitive: Primitive, origin: str) -> None:
        """Add a primitive with casts of its inputs, and of its output if this is stored in another type."""
        category = primitive.row.category
        given = self.graph.types[primitive.output].dtype
        if category is Category.LINEAR and given is DType.F32:
            computed = self.half
        elif category in MOVES and given is DType.F32:
            computed = self.types[primitive.output].dtype
        else:
            computed = given
        inputs = tuple(
            self._cast(self._source(value), computed if category in (Category.LINEAR, *MOVES) else DType.F32, origin)
            if self.graph.types[value].dtype is DType.F32
            else self._source(value)
            for value in primitive.inputs
        )
        output = primitive.output
        if computed is not self.types[output].dtype:
            output = self._value(ValueType(self.types[output].shape, computed))
            self._add(
                Primitive(
                    "cast", (output,), CastAttributes(self.types[primitive.output].dtype.value), primitive.output
                ),
                origin,
            )
        self._add(replace(primitive, inputs=inputs, output=output), origin)

    def _source(self, value: int) -> int:
        """Return the value from which a value comes through casts that change nothing."""
        while value in self.same:
            value = self.same[value]
        return value

    def _cast(self, value: int, dtype: DType, origin: str) -> int:
        """Return a value cast to an element type."""
        if self.types[value].dtype is dtype:
            return value
        key = (value, dtype)
        if key not in self.casts:
            made = self.casts[key] = self._value(ValueType(self.types[value].shape, dtype))
            if value in self.constants:
                array = self.graph.constants[value].array.astype(dtype.numpy)
                self.constants[made] = Constant.of(array)
            else:
                self._add(Primitive("cast", (value,), CastAttributes(dtype.value), made), origin)
        return self.casts[key]

    def _value(self, type_: ValueType) -> int:
        self.types.append(type_)
        return len(self.types) - 1

    def _add(self, primitive: Primitive, origin: str) -> None:
        self.primitives.append(primitive)
        self.origins.append(origin)
