"""Fission of products by matrices that are gathered at run time, as in a mixture of experts.

The gather would copy one matrix per row. One primitive reads each chosen matrix in place instead.
"""

import math

import numpy as np
import onnx

from korch.fission.context import Context
from korch.primitive.ops.gathered import GATHERED
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.types import DType, ValueId

MULTIPLIED = (DType.F32, DType.F16, DType.BF16)
"""Element types of products by gathered matrices."""


def gathered_product(c: Context, a: ValueId, b: ValueId) -> ValueId | None:
    """Return a product as a batch of products of a vector and a gathered matrix; None if it isn't one."""
    (rows, terms), columns = c.shape(a)[-2:], c.shape(b)[-1]
    lead = np.broadcast_shapes(c.shape(a)[:-2], c.shape(b)[:-2])
    if c.dtype(a) not in MULTIPLIED or not lead or min(rows, columns) != 1 or not math.prod(lead):
        return None
    for matrix, vector, is_first in ((b, a, False), (a, b, True)):
        if (columns if is_first else rows) != 1:
            continue
        found = _gathered(c, matrix)
        if found is None or c.shape(matrix)[:-2] != lead:
            continue
        weights, index, is_turned = found
        if is_turned != is_first:
            weights = c.transpose(weights, (0, 2, 1))
        x = c.broadcast(vector, (*lead, *c.shape(vector)[-2:]))
        count = math.prod(lead)
        product = c.add(GATHERED, c.reshape(x, (count, terms)), weights, c.reshape(index, (count,)))
        return c.reshape(product, (*lead, rows, columns))
    return None


def _gathered(c: Context, value: ValueId) -> tuple[ValueId, ValueId, bool] | None:
    """Return constant matrices, the index that gathers one per batch element, and whether they are then transposed."""
    maker = c.builder.maker_of(value)
    is_turned = False
    if maker is not None and isinstance(maker.attributes, TransposeAttributes):
        rank = c.rank(value)
        if maker.attributes.perm != (*range(rank - 2), rank - 1, rank - 2):
            return None
        is_turned, maker = True, c.builder.maker_of(maker.inputs[0])
    if maker is None or not isinstance(maker.attributes, OpaqueAttributes) or maker.attributes.domain:
        return None
    weights, *rest = maker.inputs
    if c.builder.constant_of(weights) is None or c.rank(ValueId(weights)) != 3:
        return None
    index = ValueId(rest[0]) if rest else None
    if index is None or not _selects_matrices(maker.attributes, c.shape(index)):
        return None
    return ValueId(weights), index, is_turned


def _selects_matrices(attributes: OpaqueAttributes, index: tuple[int, ...]) -> bool:
    """Return whether an operator gathers whole matrices from a stack of matrices."""
    node = onnx.NodeProto.FromString(bytes.fromhex(attributes.node))
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if attributes.op_type == "Gather":
        return int(given.get("axis", 0)) in (0, -3)
    return attributes.op_type == "GatherND" and not given.get("batch_dims", 0) and index[-1:] == (1,)
