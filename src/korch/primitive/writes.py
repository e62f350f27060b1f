"""Scatters of rows into an input of a model, with an output as result: writes that may be in the input's memory.

PyTorch's exporter writes `index_copy_` on a buffer, such as a static cache, as `ScatterND` between two transpositions.
"""

from collections.abc import Iterator, Mapping

import onnx

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.ops.state import WRITE_ROWS, WriteAttributes
from korch.primitive.types import DType, ValueId
from korch.primitive.verbs import Verbs, copied, rebuilt

Perm = tuple[int, ...]


def write_rows(graph: PrimitiveGraph) -> PrimitiveGraph:
    """Return a graph in which scattered rows of an input are written along the input's own axis, if an output has them.

    `graph`: a graph without alternatives. Rows at indices out of range are an error, as in `ScatterND`.
    """
    found = dict(_scatters(graph))
    if not found:
        return graph
    written: dict[int, tuple[ValueId, Perm]] = {}

    def write(verbs: Verbs, p: Primitive, known: Mapping[int, ValueId]) -> ValueId:
        if p.output in found:
            x, perm = found[p.output]
            rows = _transposed(verbs, known[p.inputs[2]], _inverse(perm))
            places = verbs.reshape(known[p.inputs[1]], graph.types[p.inputs[1]].shape[:1])
            attributes = WriteAttributes(perm[0], is_checked=True)
            whole = verbs.add(WRITE_ROWS, known[x], rows, places, attributes=attributes)
            written[p.output] = whole, _inverse(perm)
            return verbs.transpose(whole, perm)
        if p.inputs and p.inputs[0] in written and _perm(p) == written[p.inputs[0]][1]:
            return written[p.inputs[0]][0]
        return copied(verbs, p, known)

    return rebuilt(graph, write)


def _scatters(graph: PrimitiveGraph) -> Iterator[tuple[int, tuple[int, Perm]]]:
    """Yield the result of each scatter, with the input that it changes, and how its axes are permuted before."""
    inputs, outputs = ({value for _, value in ends} for ends in (graph.inputs, graph.outputs))
    turned = {p.output: (p.inputs[0], perm) for p in graph.primitives if (perm := _perm(p)) is not None}
    returned = {turned[value] for value in outputs if value in turned}
    for p in graph.primitives:
        if not _scatters_rows(p, graph):
            continue
        rank = graph.types[p.output].rank
        x, perm = turned.get(p.inputs[0], (p.inputs[0], tuple(range(rank))))
        is_returned = p.output in outputs if perm == tuple(range(rank)) else (p.output, _inverse(perm)) in returned
        if x in inputs and is_returned:
            yield p.output, (x, perm)


def _scatters_rows(p: Primitive, graph: PrimitiveGraph) -> bool:
    """Return whether a primitive replaces rows along the first axis at computed places."""
    attributes = p.attributes
    if not isinstance(attributes, OpaqueAttributes) or (attributes.op_type, attributes.domain) != ("ScatterND", ""):
        return False
    node = onnx.NodeProto.FromString(bytes.fromhex(attributes.node))
    index, count = graph.types[p.inputs[1]], graph.types[p.output].shape[0]
    is_computed = len(set(p.inputs)) == 3 and not graph.constants.keys() & {*p.inputs}
    is_single = index.rank == 2 and index.shape[1] == 1 and index.dtype is DType.I64 and index.shape[0] < count
    return is_computed and is_single and all(a.name != "reduction" or a.s == b"none" for a in node.attribute)


def _perm(p: Primitive) -> Perm | None:
    return p.attributes.perm if isinstance(p.attributes, TransposeAttributes) else None


def _inverse(perm: Perm) -> Perm:
    return tuple(perm.index(i) for i in range(len(perm)))


def _transposed(verbs: Verbs, value: ValueId, perm: Perm) -> ValueId:
    """Return a value with its axes permuted, by one transposition if the value is the result of another one."""
    maker = verbs.builder.maker_of(value)
    if maker is None or (before := _perm(maker)) is None:
        return verbs.transpose(value, perm)
    return verbs.transpose(ValueId(maker.inputs[0]), [before[i] for i in perm])
