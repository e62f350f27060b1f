"""The closed table of primitive operations."""

from korch.primitive.op import Op
from korch.primitive.ops import elementwise, gathered, layout, linear, loop, opaque, reduce, state, stored, winograd

OPS: dict[str, Op] = {
    row.name: row
    for row in (
        *elementwise.ROWS,
        *reduce.ROWS,
        *layout.ROWS,
        *linear.ROWS,
        *stored.ROWS,
        *gathered.ROWS,
        *winograd.ROWS,
        *opaque.ROWS,
        *loop.ROWS,
        *state.ROWS,
    )
}
