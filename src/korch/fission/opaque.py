"""Turns an operator that is kept whole into opaque primitives, one for each output that is read."""

from collections.abc import Iterable

import onnx

from korch.fission.context import Context
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.types import ValueId

FREE = frozenset({("TopK", "sorted")})
"""Attributes that are dropped because their defaults are stricter: unsorted TopK allows any order, so also sorted."""


def keep_whole(c: Context) -> dict[int, ValueId]:
    """Add opaque primitives; return the value of each output that is read, by position."""
    operator = c.operator
    node = onnx.NodeProto()
    node.op_type, node.domain = operator.op_type, operator.domain
    given = (item for item in operator.node.attribute if (operator.op_type, item.name) not in FREE)
    node.attribute.extend(sorted(given, key=lambda item: str(item.name)))
    node.input.extend(_numbered("x", operator.inputs))
    node.output.extend(f"y{i}" if name else "" for i, name in enumerate(operator.outputs))
    text = node.SerializeToString(deterministic=True).hex()
    inputs = tuple(str(c.builder.type(value)) for value in c.inputs)
    outputs = tuple(str(c.output_type(i)) if name else "" for i, name in enumerate(operator.outputs))
    return {
        i: c.add(
            "opaque",
            *c.inputs,
            attributes=OpaqueAttributes(operator.op_type, operator.domain, operator.version, text, inputs, outputs, i),
        )
        for i in range(len(outputs))
        if c.is_read(i)
    }


def _numbered(letter: str, names: Iterable[str]) -> list[str]:
    """Number the names that are present, such as x0, x1, ..., and keep "" for omitted ones."""
    count, result = 0, []
    for name in names:
        result.append(f"{letter}{count}" if name else "")
        count += bool(name)
    return result
