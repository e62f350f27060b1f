"""Prints what writes large outputs past the caches, in whole cache lines."""

from __future__ import annotations

from korch.tile.llvm.emit import Emit, SsaValue
from korch.tile.llvm.memory import Memory, Place
from korch.tile.lower.buffers import LINE_BYTES


def after_line(emit: Emit, place: Place) -> SsaValue:
    """Print the number of elements from the previous cache-line boundary to a place."""
    address = emit.pure("i64", 1, f"ptrtoint {place.at.typed} to i64", place.at)
    return emit.op("udiv", emit.op("and", address, emit.index(LINE_BYTES - 1)), emit.index(place.size_bytes))


def before_line(emit: Emit, place: Place) -> SsaValue:
    """Print the number of elements from a place to the next cache-line boundary."""
    address = emit.pure("i64", 1, f"ptrtoint {place.at.typed} to i64", place.at)
    rest = emit.op("and", emit.op("sub", emit.index(0), address), emit.index(LINE_BYTES - 1))
    return emit.op("udiv", rest, emit.index(place.size_bytes))


def stream_span(memory: Memory, to: Place, source: Place, count: SsaValue) -> None:
    """Print a copy of elements, whole cache lines past the caches; both places have the same offset within a line."""
    emit, size = memory.emit, to.size_bytes
    line = LINE_BYTES // size

    def copy(i: SsaValue, lanes: int, note: str = "") -> None:
        at, own = (emit.place(place.kind, place.at, i) for place in (to, source))
        align = LINE_BYTES if note else size
        emit.store(emit.load(source.kind, lanes, own, align, emit.depth, source.era), at, align, note)

    head = emit.least(before_line(emit, to), count)
    emit.loop(emit.index(0), head, 1, lambda i: copy(i, 1))
    whole = emit.add(head, emit.op("and", emit.add(count, emit.times(head, -1)), emit.index(-line)))
    emit.loop(head, whole, line, lambda i: copy(i, line, ", !nontemporal !0"))
    emit.loop(whole, count, 1, lambda i: copy(i, 1))


def end_streams(emit: Emit) -> None:
    """Print the barrier after which other threads may read what was written past the caches."""
    emit.declare("llvm.x86.sse.sfence", "void")
    emit.effect("call void @llvm.x86.sse.sfence()")
