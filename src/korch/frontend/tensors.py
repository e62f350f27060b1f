"""Reads the tensors of a model file as NumPy arrays.

External data is memory-mapped, not read, unless its elements have fewer than 8 bits. The model gives its
location, and models may come from untrusted sources: a location outside of the model's folder, by an absolute
path, by `..` or through a symbolic link, is refused.
"""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from korch.errors import ModelError, UnsupportedError
from korch.primitive.op import Array
from korch.system.files import open_file

PACKED_BITS = {"INT2": 2, "UINT2": 2, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
"""The bits of an element, for types whose elements are not stored in whole bytes."""


def read_tensor(tensor: onnx.TensorProto, folder: Path | None, model: str) -> Array:
    """Return a tensor's elements.

    `folder`: the model's folder, or None if the model came from memory.

    Raises:
        ModelError: the tensor is damaged, or its external data is missing, too short, or outside
            the model's folder.
        UnsupportedError: external data that is text.
    """
    where = f"{model}: tensor {tensor.name!r}"
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _external(tensor, folder, where)
    if min(tensor.dims, default=0) < 0:
        raise ModelError(f"its shape is {list(tensor.dims)}: a size is negative", where=where)
    try:
        array: Array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, MemoryError, OverflowError) as error:
        raise ModelError(f"its elements can't be read ({error})", where=where) from error
    return array


def data_files(path: Path) -> list[Path]:
    """Return the paths of a model's external data; an empty list if the model can't be read."""
    try:
        with open_file(path) as stream:
            model = onnx.ModelProto.FromString(stream.read())
    except (OSError, ValueError, DecodeError):
        return []
    places = {
        entry.value
        for tensor in _tensors(model.graph)
        for entry in tensor.external_data
        if entry.key == "location" and "\0" not in entry.value
    }
    return [path.parent / place for place in sorted(places)]


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a graph and of its nested graphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from [attribute.t, *attribute.tensors]
            for inner in [attribute.g, *attribute.graphs]:
                yield from _tensors(inner)


def _external(tensor: onnx.TensorProto, folder: Path | None, where: str) -> Array:
    if folder is None:
        raise ModelError(
            "it is stored in another file, and the model came from memory",
            where=where,
            hint="Give the path of the model's file",
        )
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _inside(folder, entries.get("location", ""), where)
    dtype, shape = _type_of(tensor, where), tuple(tensor.dims)
    if min(shape, default=0) < 0:
        raise ModelError(f"its shape is {shape}", where=where)
    bits = PACKED_BITS.get(onnx.TensorProto.DataType.Name(tensor.data_type), 8 * dtype.itemsize)
    size_bytes = -(-math.prod(shape) * bits // 8)
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or size_bytes)
    except ValueError as error:
        raise ModelError(f"its place is no number ({error})", where=where) from error
    if length != size_bytes or offset < 0:
        raise ModelError(
            f"its external data has {length} bytes from {offset}", where=where, expected=f"{size_bytes} bytes"
        )
    available = path.stat().st_size
    if offset + length > available:
        raise ModelError(
            f"its external data ends at byte {offset + length} of {path.name!r}, which has {available}",
            where=where,
            hint="The file was cut short: copy or download it again",
        )
    if not length:
        return np.zeros(shape, dtype)
    if bits < 8:
        packed = np.memmap(path, np.uint8, "r", offset, (length,)).tobytes()
        inside = onnx.TensorProto(data_type=tensor.data_type, dims=shape, raw_data=packed)
        unpacked: Array = onnx.numpy_helper.to_array(inside)
        return unpacked
    return np.memmap(path, dtype, "r", offset, shape if shape else (1,)).reshape(shape)


def _type_of(tensor: onnx.TensorProto, where: str) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    except (KeyError, ValueError) as error:
        raise ModelError(f"there is no element type {tensor.data_type}", where=where) from error
    if dtype.kind == "O":
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        raise UnsupportedError(f"external data of type {name} can't be read", where=where)
    return dtype


def _inside(folder: Path, location: str, where: str) -> Path:
    pure = PurePosixPath(location)
    outside = (
        not location
        or "\0" in location
        or pure.is_absolute()
        or ".." in pure.parts
        or PureWindowsPath(location).drive
        or "\\" in location
    )
    path = folder / location
    if not outside:
        outside = not path.resolve().is_relative_to(folder.resolve())
    if outside:
        raise ModelError(
            f"its external data is at {location!r}, which is outside the model's folder",
            where=where,
            hint="Korch reads no file outside the folder of the model; put the data there",
        )
    if not path.is_file():
        raise ModelError(
            f"its external data is missing: there is no file {location!r}", where=where, hint=f"Copy it to {folder}"
        )
    return path
