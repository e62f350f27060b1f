"""The closed table of primitive operations."""

from korch.primitive.op import Op
from korch.primitive.ops import elementwise, layout, linear, opaque, reduce, winograd

OPS: dict[str, Op] = {
    row.name: row for row in (*elementwise.ROWS, *reduce.ROWS, *layout.ROWS, *linear.ROWS, *winograd.ROWS, *opaque.ROWS)
}
