"""Packed constants: arrays in one aligned block of memory, and their safetensors form.

A safetensors file consists of the length of a header (8 bytes, little-endian), the header as JSON, and
the tensors' bytes without gaps. So its tensors can't be aligned, and are copied to aligned places when read.

The checksum of a file is the checksum of the checksums of its blocks, so that several threads can check a
file while they read it. It is XXH3, which is as fast as memory; SHA-256 is not.

Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from korch.errors import ArtifactError
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType
from korch.system.alignment import align_up, aligned_bytes

MAX_HEADER_BYTES = 100 << 20
CHUNK_BYTES = 1 << 20
"""The size of a block: small enough to be checked and copied while it is in a core's own cache."""

MOST_THREADS = 8

ReadAt = Callable[[int, memoryview], None]
"""Fills memory with the bytes of a file that begin at a position; raises EOFError if the file ends before."""


@dataclass(frozen=True)
class Weights:
    """The packed constants of a plan.

    Attributes:
        types: the shape in memory and the element type of each constant.
        offsets: the offset of each constant in `block`; multiples of 64.
        block: uint8[n], aligned to 64 bytes.
    """

    types: tuple[ValueType, ...]
    offsets: tuple[int, ...]
    block: Array

    @staticmethod
    def allocate(types: Sequence[ValueType]) -> Weights:
        """Return weights of these types with uninitialised elements."""
        offsets, end = [], 0
        for type_ in types:
            offsets.append(end)
            end = align_up(end + type_.size_bytes)
        return Weights(tuple(types), tuple(offsets), aligned_bytes(end))

    def __len__(self) -> int:
        return len(self.types)

    def array(self, i: int) -> Array:
        """Return a view of tensor `i`."""
        type_ = self.types[i]
        part = self.block[self.offsets[i] : self.offsets[i] + type_.size_bytes]
        return part.view(type_.dtype.numpy).reshape(type_.shape)

    @property
    def size_bytes(self) -> int:
        """The total size of the tensors, without the padding for alignment."""
        return sum(type_.size_bytes for type_ in self.types)

    @property
    def pointers(self) -> list[int]:
        """The address of each tensor."""
        base = int(self.block.ctypes.data)
        return [base + offset for offset in self.offsets]

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the safetensors form."""
        header: dict[str, object] = {}
        end = 0
        for i, type_ in enumerate(self.types):
            start, end = end, end + type_.size_bytes
            header[f"c{i}"] = {"dtype": type_.dtype.name, "shape": list(type_.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little")
        yield text
        for offset, type_ in zip(self.offsets, self.types, strict=True):
            for start in range(offset, offset + type_.size_bytes, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, offset + type_.size_bytes)
                yield self.block[start:stop].data

    @staticmethod
    def read(read_at: ReadAt, size_bytes: int) -> tuple[Weights, str]:
        """Read the safetensors form; return the weights and the `checksum` of the bytes read.

        `read_at`: reads the bytes of the form; called by several threads.

        Raises:
            ArtifactError: it is not a safetensors form as `chunks` yields it.
        """
        length = int.from_bytes(_bytes_at(read_at, 0, 8, size_bytes), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise _damaged(f"its header has {length} bytes")
        types = _types(_bytes_at(read_at, 8, length, size_bytes))
        begins = [8 + length]
        for type_ in types:
            begins.append(begins[-1] + type_.size_bytes)
        if begins[-1] != size_bytes:
            raise _damaged(f"it has {size_bytes} bytes; its header tells of {begins[-1]}")
        weights = Weights.allocate(types)
        blocks = -(-size_bytes // CHUNK_BYTES)
        threads = max(1, min(MOST_THREADS, os.cpu_count() or 1, blocks))
        read = partial(_read_blocks, read_at, size_bytes, begins, weights)
        with ThreadPoolExecutor(threads) as pool:
            parts = pool.map(read, (range(k, blocks, threads) for k in range(threads)))
        digests = dict(item for part in parts for item in part)
        return weights, _combined(digests[b] for b in range(blocks))


def checksum(chunks: Iterable[bytes | memoryview]) -> str:
    """Return the checksum of the bytes that `Weights.chunks` yields: XXH3-128 over the XXH3-128 of each MiB."""
    digests: list[bytes] = []
    block, filled = xxhash.xxh3_128(), 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view:
            part = view[: CHUNK_BYTES - filled]
            block.update(part)
            view, filled = view[len(part) :], filled + len(part)
            if filled == CHUNK_BYTES:
                digests.append(block.digest())
                block, filled = xxhash.xxh3_128(), 0
    if filled:
        digests.append(block.digest())
    return _combined(digests)


def _combined(digests: Iterable[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def _bytes_at(read_at: ReadAt, start: int, count: int, size_bytes: int) -> bytes:
    if start + count > size_bytes:
        raise _damaged(f"it has {size_bytes} bytes")
    found = bytearray(count)
    read_at(start, memoryview(found))
    return bytes(found)


def _read_blocks(
    read_at: ReadAt, size_bytes: int, begins: Sequence[int], weights: Weights, numbers: Sequence[int]
) -> list[tuple[int, bytes]]:
    """Read some blocks into their tensors; return the number and the checksum of each block."""
    found = []
    for number in numbers:
        at, stop = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, size_bytes)
        digest = xxhash.xxh3_128()
        i = bisect_right(begins, at) - 1  # the tensor that is read; before the first one, the header
        while at < stop:
            end = min(begins[i + 1], stop)
            to = weights.offsets[i] + at - begins[i] if i >= 0 else 0
            part = weights.block[to : to + end - at] if i >= 0 else np.empty(end - at, np.uint8)
            read_at(at, part.data)
            digest.update(part.data)
            at, i = end, i + 1
        found.append((number, digest.digest()))
    return found


def _types(header: bytes) -> list[ValueType]:
    """Return the tensors' types; the tensors must be named c0, c1, ... and be stored in this order."""
    try:
        entries = json.loads(header)
        types, end = [], 0
        for i in range(len(entries)):
            entry = entries[f"c{i}"]
            type_ = ValueType(tuple(map(int, entry["shape"])), DType[entry["dtype"]])
            start, end = end, end + type_.size_bytes
            if min(type_.shape, default=0) < 0 or entry["data_offsets"] != [start, end]:
                raise _damaged(f"tensor c{i} does not follow the one before it")
            types.append(type_)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _damaged(f"its header can't be read: {error!r}") from error
    return types


def _damaged(text: str) -> ArtifactError:
    return ArtifactError(text, where="weights.safetensors", hint="Build the artifact again")
