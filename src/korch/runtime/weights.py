"""Packed constants: arrays in one aligned block of memory, and their safetensors form.

A safetensors file is the length of a header (8 bytes, little-endian), the header as JSON, and the
tensors' bytes without holes; so its tensors can't be aligned, and are copied into place when read.

Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

from korch.alignment import align_up, aligned_bytes
from korch.errors import ArtifactError
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType

MAX_HEADER_BYTES = 100 << 20
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Weights:
    """The packed constants of a plan.

    Attributes:
        types: the shape in memory and the element type of each.
        offsets: where each begins in `block`; multiples of 64.
        block: uint8[n], aligned to 64 bytes.
    """

    types: tuple[ValueType, ...]
    offsets: tuple[int, ...]
    block: Array

    @staticmethod
    def allocate(types: Sequence[ValueType]) -> Weights:
        """Return weights of these types, with elements yet to be written."""
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
        """Bytes of all tensors, without what aligns them."""
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
            header[f"c{i}"] = {
                "dtype": type_.dtype.name,
                "shape": list(type_.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little")
        yield text
        for offset, type_ in zip(self.offsets, self.types, strict=True):
            for start in range(offset, offset + type_.size_bytes, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, offset + type_.size_bytes)
                yield self.block[start:stop].data

    @staticmethod
    def read(stream: IO[bytes]) -> Weights:
        """Read the safetensors form.

        Raises:
            ArtifactError: it is none, or not one that `chunks` gives.
        """
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise _damaged(f"its header has {length} bytes")
        weights = Weights.allocate(_types(stream.read(length)))
        for i in range(len(weights)):
            flat = weights.array(i).reshape(-1).view(np.uint8)
            for start in range(0, flat.size, CHUNK_BYTES):
                part = stream.read(min(CHUNK_BYTES, flat.size - start))
                if len(part) != min(CHUNK_BYTES, flat.size - start):
                    raise _damaged(f"tensor c{i} is cut short")
                flat[start : start + len(part)] = np.frombuffer(part, np.uint8)
        if stream.read(1):
            raise _damaged("there are bytes behind the last tensor")
        return weights


def _types(header: bytes) -> list[ValueType]:
    """Return the tensors' types; they must be named c0, c1, ... and lie in this order."""
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
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(f"its header can't be read: {error!r}") from error
    return types


def _damaged(text: str) -> ArtifactError:
    return ArtifactError(text, where="weights.safetensors", hint="Build the artifact again")
