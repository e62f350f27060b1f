"""The closed table of primitive operations."""

from korch.primitive.op import Op
from korch.primitive.ops import elementwise, layout, linear, opaque, reduce, stored, winograd

OPS: dict[str, Op] = {
    row.name: row
    for row in (*elementwise.ROWS, *reduce.ROWS, *layout.ROWS, *linear.ROWS, *stored.ROWS, *winograd.ROWS, *opaque.ROWS)
}
