"""Chooses the initializers that are also inputs of a model: a caller may give other elements for them.

Up to IR version 3 every initializer had to be listed as an input, and some exporters still list all weights.
ONNX Runtime then treats weights as unknown, which is slow. So only floats count as meant to be given, without scales of
images, and only if all of them together are small; the others are constants, as their defaults may decide shapes.
"""

import logging
from collections.abc import Mapping

import onnx

from korch.frontend.infer import array_type_proto
from korch.primitive.op import Array
from korch.primitive.types import DType

logger = logging.getLogger("korch.frontend")

MOST_BYTES = 1 << 16
"""The most bytes of all defaults together; more are weights of an exporter that lists all of them."""

FIRST_VERSION = 4
"""The IR version from which an initializer need not be an input."""

FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})


def choose_defaults(proto: onnx.ModelProto, arrays: Mapping[str, Array], name: str) -> dict[str, Array]:
    """Return the elements of the initializers that can be given at run time, by name.

    Source:
        ONNX, IR specification, "Graphs": an initializer with the name of an input is its default value.
    """
    listed = [item.name for item in proto.graph.input if item.name in arrays]
    if proto.ir_version < FIRST_VERSION or not listed:
        return {}
    scales = {name for node in proto.graph.node if node.op_type in ("Resize", "Upsample") for name in node.input[1:]}
    floats = {dtype.numpy for dtype in FLOATS}
    found = {n: arrays[n] for n in listed if arrays[n].dtype in floats and n not in scales}
    size_bytes = sum(array.nbytes for array in found.values())
    if size_bytes > MOST_BYTES:
        logger.info(
            "%s: %d initializers that are also inputs are constants, since they have %d bytes",
            name,
            len(found),
            size_bytes,
        )
        return {}
    return found


def with_type(declared: onnx.ValueInfoProto, default: Array | None) -> onnx.ValueInfoProto:
    """Return an input with the type of its default, if it has one."""
    if default is None:
        return declared
    return onnx.helper.make_value_info(declared.name, array_type_proto(default))
