"""What the definitions of operators read: the inputs and the attributes of a node."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from korch.primitive.op import Array

Inputs = Sequence[Array | None]
Given = Mapping[str, Any]
Definition = Callable[[Inputs, Given], Sequence[Array]]
"""Returns the outputs for the inputs (None for an omitted one) and the attributes that the node sets, with `OPSET`."""

OPSET = "version of the operator set"


def optional(inputs: Inputs, i: int) -> Array | None:
    """Return an input; None if it is omitted."""
    return inputs[i] if i < len(inputs) else None


def present(inputs: Inputs, i: int) -> Array:
    """Return an input.

    Raises:
        NotImplementedError: it is omitted.
    """
    found = optional(inputs, i)
    if found is None:
        raise NotImplementedError(f"input {i} is omitted")
    return found
