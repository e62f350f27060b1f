"""The buffers of a group's inputs and outputs, and the memory addresses of a program's buffers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from korch.candidate.layout import Layout
from korch.primitive.graph import PrimitiveGraph
from korch.tile.ir.program import Buffer, Level, Split, TileProgram

LINE_BYTES = 64
"""The size of a cache line in bytes; buffers in the workspace are aligned to it."""


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """The address of a buffer."""

    position: int  # the number of the kernel argument; the workspace comes after inputs and outputs
    offset_bytes: int  # the offset from the start of that argument
    element_bytes: int  # the size of an element in memory


def ports(body: PrimitiveGraph, layouts: Mapping[str, Layout]) -> Iterator[Buffer]:
    """Yield the buffers of a group's inputs and outputs, which are stored in the given layouts."""
    for values, level in ((body.inputs, Level.INPUT), (body.outputs, Level.OUTPUT)):
        for name, value in values:
            type_ = body.types[value]
            yield Buffer(name, level, type_.dtype, math.prod(layouts[name].physical_shape(type_.shape)))


def places_in_memory(program: TileProgram) -> tuple[dict[str, BufferPlace], int]:
    """Return the address of each buffer that is not a tile, and the size of the workspace in bytes."""
    memory = [buffer for buffer in program.buffers if buffer.level is not Level.TILE]
    ports = [buffer for buffer in memory if buffer.level is not Level.WORKSPACE]
    places = {
        buffer.name: BufferPlace(i, 0, _stored_bytes(buffer, buffer.dtype.size_bytes)) for i, buffer in enumerate(ports)
    }
    offset_bytes = 0
    for buffer in memory:
        if buffer.level is Level.WORKSPACE:
            places[buffer.name] = BufferPlace(len(ports), offset_bytes, computed_bytes(buffer))
            offset_bytes += -(-buffer.size * computed_bytes(buffer) // LINE_BYTES) * LINE_BYTES
    return places, offset_bytes


def computed_bytes(buffer: Buffer) -> int:
    """Return the size of an element in bytes if 16-bit floats are stored as float32, in which they are computed."""
    is_narrow = buffer.dtype.is_float and buffer.dtype.size_bytes == 2
    return _stored_bytes(buffer, 4 if is_narrow else buffer.dtype.size_bytes)


def _stored_bytes(buffer: Buffer, whole: int) -> int:
    """Return the size of an element in bytes: `whole`, or the size of all its components if it is split."""
    components = (layout.components * layout.dtype.size_bytes for layout in buffer.layout if isinstance(layout, Split))
    return next(components, whole)
