"""Rows that replace those of another value at given positions, such as a step's keys in a cache of keys."""

from collections.abc import Sequence
from dataclasses import dataclass

from korch.primitive.op import Array, Attributes, Category, Op, no_flop, require
from korch.primitive.types import DType, ValueType

WRITE_ROWS = "write_rows"
"""The operation's name."""


@dataclass(frozen=True, slots=True)
class WriteAttributes(Attributes):
    """Where rows are written."""

    axis: int  # the axis along which rows are counted; positions are taken modulo its size
    is_state: bool = False  # whether argument 0 is memory that is overwritten: the result lies in the same memory
    is_checked: bool = False  # whether positions are indices: negative ones count from the end, others are an error


def _infer(inputs: Sequence[ValueType], attributes: WriteAttributes) -> ValueType:
    require(len(inputs) == 3, f"write_rows: there are {len(inputs)} arguments")
    whole, rows, positions = inputs
    axis = attributes.axis
    require(0 <= axis < whole.rank, f"write_rows: {whole} has no axis {axis}")
    require(rows.dtype is whole.dtype and rows.rank == whole.rank, f"write_rows: argument 1 is {rows}")
    others = (n == m for i, (n, m) in enumerate(zip(whole.shape, rows.shape, strict=True)) if i != axis)
    require(all(others), f"write_rows: argument 1 is {rows}")
    is_index = positions.dtype is DType.I64 and positions.shape == rows.shape[axis : axis + 1]
    require(is_index, f"write_rows: argument 2 is {positions}")
    return whole


def _reference(inputs: Sequence[Array], attributes: WriteAttributes) -> Array:
    whole, rows, positions = inputs
    out, count = whole.copy(), whole.shape[attributes.axis]
    if attributes.is_checked and ((positions < -count) | (positions >= count)).any():
        raise IndexError(f"write_rows: a position is out of range for axis {attributes.axis} with size {count}")
    out[(slice(None),) * attributes.axis + (positions % max(1, count),)] = rows
    return out


ROWS: tuple[Op, ...] = (
    Op(
        name=WRITE_ROWS,
        category=Category.OPAQUE,
        arity=3,
        attributes=WriteAttributes,
        infer=_infer,
        reference=_reference,
        work_flop=no_flop,
        source="ONNX TensorScatter in the mode circular, opset 24, with the position of each row",
    ),
)
