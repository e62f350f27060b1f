"""Rewrites products by chosen matrices that a target can't compute directly as a gather and a batched product."""

from collections.abc import Callable, Mapping

import onnx

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.ops.gathered import GATHERED
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.types import DType, ValueId
from korch.primitive.verbs import Verbs, copied, lit, rebuilt


def gather_matrices(graph: PrimitiveGraph, keeps: Callable[[Primitive], bool]) -> PrimitiveGraph:
    """Return a graph in which chosen matrices are copied for each row, and then multiplied as a batch.

    `keeps`: whether the target computes a product by chosen matrices directly; it is then left unchanged.
    """
    if all(p.op != GATHERED or keeps(p) for p in graph.primitives):
        return graph

    def write(verbs: Verbs, primitive: Primitive, values: Mapping[int, ValueId]) -> ValueId:
        if primitive.op == GATHERED and not keeps(primitive):
            return _gathered(verbs, *(values[value] for value in primitive.inputs))
        return copied(verbs, primitive, values)

    return rebuilt(graph, write)


def _gathered(verbs: Verbs, rows: ValueId, matrices: ValueId, index: ValueId) -> ValueId:
    (count, terms, columns), (m, _) = verbs.builder.type(matrices).shape, verbs.builder.type(rows).shape
    wide = verbs.cast(index, DType.I64)
    clipped = verbs.elementwise("max", verbs.elementwise("min", wide, lit(count - 1)), lit(-count))
    own = gather(verbs, matrices, clipped, 0)
    return verbs.reshape(verbs.add("matmul", verbs.reshape(rows, (m, 1, terms)), own), (m, columns))


def gather(verbs: Verbs, data: ValueId, index: ValueId, axis: int) -> ValueId:
    """Add a primitive that gathers elements along an axis by a vector of indices."""
    node = onnx.helper.make_node("Gather", ["x0", "x1"], ["y0"], axis=axis)
    given, count = verbs.builder.type(data), verbs.builder.type(index)
    out = given.with_shape((*given.shape[:axis], *count.shape, *given.shape[axis + 1 :]))
    text = node.SerializeToString(deterministic=True).hex()
    attributes = OpaqueAttributes("Gather", "", 13, text, (str(given), str(count)), (str(out),), 0)
    return verbs.add("opaque", data, index, attributes=attributes)
