"""The offer and the tile program for a group with an opaque `TopK` along the last axis.

The operator is not split into primitives, so that this kernel competes with ONNX Runtime's kernel for it.
"""

from korch.candidate.candidate import Group, Offer, Refusal
from korch.primitive.types import DType, ValueType
from korch.provider.opaque import attributes_of, node_of
from korch.target import Target
from korch.tile.ir.program import Axis, Buffer, Level, Stage, TileProgram
from korch.tile.ir.sort import Top
from korch.tile.lower.staging import Machine

ORDERED = (DType.F32, DType.F64, DType.I64, DType.I32, DType.I16, DType.I8, DType.U32, DType.U16, DType.U8)
"""Element types whose values kernels can compare; 16-bit floats are stored as integers and can't be compared so."""


def offer_top(group: Group, _target: Target) -> tuple[Offer, ...] | Refusal:
    """Offer a `TopK` along the last axis, in plain layouts, so that each row is contiguous."""
    node = node_of(group.body.primitives[0])
    rows = ValueType.parse(node.inputs[0])
    axis = attributes_of(node).get("axis", -1)
    if axis % max(rows.rank, 1) != rows.rank - 1:
        return Refusal("it is not along the last axis")
    if rows.dtype not in ORDERED:
        return Refusal(f"elements of type {rows.dtype.value} are not ordered")
    if not all(type_.size for type_ in (rows, *group.output_types)):
        return Refusal("there are no elements")
    if group.body.primitives[0].inputs[0] not in group.position:
        return Refusal("the elements are constants")
    return (Offer(*group.plain_layouts),)


def orders_nan(group: Group, target: Target) -> bool:
    """Return whether the group is a `TopK` of the smallest floats that this kernel takes; NaN is the greatest."""
    node = node_of(group.body.primitives[0])
    is_smallest = node.op_type == "TopK" and not attributes_of(node).get("largest", 1)
    is_float = is_smallest and ValueType.parse(node.inputs[0]).dtype.is_float
    return is_float and not isinstance(offer_top(group, target), Refusal)


def top_program(group: Group, machine: Machine, _variant: str = "") -> TileProgram:
    """Return the program of the offer: each task processes one row."""
    body = group.body
    primitives = {p.output: p for p in body.primitives}
    node, source = node_of(body.primitives[0]), body.primitives[0].inputs[0]
    size = body.types[source].shape[-1]
    names = dict.fromkeys((0, 1), "")
    buffers = []
    for i, (_, value) in enumerate(body.inputs):
        buffers.append(Buffer(f"i{i}", Level.INPUT, body.types[value].dtype, body.types[value].size))
    for i, (_, value) in enumerate(body.outputs):
        names[node_of(primitives[value]).output] = f"o{i}"
        buffers.append(Buffer(f"o{i}", Level.OUTPUT, body.types[value].dtype, body.types[value].size))
    rows = body.types[source].size // size
    count = body.types[body.outputs[0][1]].shape[-1]
    is_largest = bool(attributes_of(node).get("largest", 1))
    top = Top(f"i{group.position[source]}", rows, size, count, is_largest, names[0], names[1])
    return TileProgram(tuple(buffers), (Stage((Axis("g0", rows),), (), top),))
