"""A part of a random graph: several nodes that read one value and write one."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from korch.primitive.op import Array


@dataclass
class Fragment:
    """Nodes with their constants; the last node writes the fragment's output."""

    nodes: list[Any] = field(default_factory=list)  # in order
    constants: list[Any] = field(default_factory=list)  # the initializers that they read


class Writer:
    """Adds nodes to a fragment; the names begin with the name of its output."""

    def __init__(self, out: str) -> None:
        self.out, self.fragment = out, Fragment()

    def constant(self, array: Any) -> str:
        name = f"{self.out}_c{len(self.fragment.constants)}"
        self.fragment.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def four_bits(self, array: Array, dtype: int) -> str:
        name = f"{self.out}_c{len(self.fragment.constants)}"
        self.fragment.constants.append(helper.make_tensor(name, dtype, array.shape, array.reshape(-1).tolist()))
        return name

    def node(self, op: str, inputs: list[str], *, last: bool = False, outputs: int = 1, **attributes: Any) -> str:
        """Add a node; of its outputs, only the last one has a name."""
        name = self.out if last else f"{self.out}_t{len(self.fragment.nodes)}"
        self.fragment.nodes.append(helper.make_node(op, inputs, [""] * (outputs - 1) + [name], **attributes))
        return name
