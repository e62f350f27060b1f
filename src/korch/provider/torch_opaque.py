"""Opaque operators on CUDA devices: those that PyTorch has as one, with the same meaning.

A table from an operator to the text of a call; what is not in it is refused, and the model with it:
add a line for an operator that PyTorch has. Calls are captured in a graph, so nothing in them may
wait for the device or depend on what a tensor holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.cuda.kernel import Call, CudaKernel, named
from korch.cuda.target import CudaTarget
from korch.primitive.graph import Constant
from korch.primitive.ops.opaque import OpaqueAttributes

SCHEMA = 1
"""Raise it whenever the calls change."""


@dataclass(frozen=True)
class Node:
    """An operator as the table sees it.

    Attributes:
        inputs: names of tensors; "" where one is left out.
        rank: axes of the first input.
        attributes: by name.
        constants: the inputs that are known, by position.
    """

    inputs: tuple[str, ...]
    rank: int
    attributes: Mapping[str, Any]
    constants: Mapping[int, Constant]

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute; strings as str."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    @property
    def axis(self) -> int:
        """The attribute `axis`, not negative; the last one if it is not given."""
        return int(self.get("axis", -1)) % max(1, self.rank)


def _extreme(function: str) -> Callable[[Node], str | None]:
    def text(node: Node) -> str | None:
        if node.get("select_last_index", 0):
            return None
        axis = int(node.get("axis", 0)) % max(1, node.rank)
        keep = bool(node.get("keepdims", 1))
        return f"torch.{function}({node.inputs[0]}, {axis}, {keep}),"

    return text


def _top(node: Node) -> str | None:
    if 1 not in node.constants:
        return None
    count = int(node.constants[1].array.reshape(-1)[0])
    largest = bool(node.get("largest", 1))
    # A stable sort: of equal elements the first one comes first, as ONNX has it.
    return (
        f"tuple(part.narrow({node.axis}, 0, {count}) for part in torch.sort({node.inputs[0]}, "
        f"dim={node.axis}, descending={largest}, stable=True))"
    )


def _grid(node: Node) -> str | None:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(*2 * (node.get("mode", "linear"),))
    pads = node.get("padding_mode", "zeros")
    corners = bool(node.get("align_corners", 0))
    if node.rank != 4 or mode not in ("bilinear", "nearest", "bicubic"):
        return None
    return (
        f"torch.nn.functional.grid_sample({node.inputs[0]}, {node.inputs[1]}, {mode!r}, {pads!r}, "
        f"{corners}),"
    )


def _hardmax(node: Node) -> str:
    x, axis = node.inputs[0], node.axis
    return f"torch.zeros_like({x}).scatter_({axis}, torch.argmax({x}, {axis}, True), 1.0),"


TABLE: dict[str, Callable[[Node], str | None]] = {
    "ArgMax": _extreme("argmax"), "ArgMin": _extreme("argmin"), "TopK": _top, "GridSample": _grid,
    "Hardmax": _hardmax, "Det": lambda node: f"torch.linalg.det({node.inputs[0]}),",
}  # fmt: skip
"""By operator: the text of a tuple of its outputs, None for a form that PyTorch does not have."""


class TorchOpaqueProvider:
    """Makes calls of PyTorch for opaque operators."""

    name = "torch-opaque"
    version = str(SCHEMA)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer an operator that is in the table, in plain layouts."""
        found = _call(group)
        if isinstance(found, Refusal):
            return found
        return (
            Offer(
                tuple(Layout.plain(type_.rank) for type_ in group.input_types),
                tuple(Layout.plain(type_.rank) for type_ in group.output_types),
            ),
        )

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Print the call."""
        text = _call(group)
        if isinstance(text, Refusal):
            return text
        arguments = ", ".join(["torch", *(name for name, _ in group.body.inputs)])
        source = f"def NAME({arguments}):\n{text}"
        symbol = named("t", source)
        return CudaKernel((Call(symbol, source.replace("NAME", symbol)),))


def _call(group: Group) -> str | Refusal:
    """Return the body of the function."""
    body = group.body
    if not body.primitives or any(p.op != "opaque" for p in body.primitives):
        return Refusal("only opaque operators are run as calls of PyTorch")
    first = body.primitives[0]
    attributes = {p.output: p.attributes for p in body.primitives}
    if not isinstance(first.attributes, OpaqueAttributes):
        raise AssertionError("an opaque primitive without its attributes")
    operator = first.attributes
    for primitive in body.primitives:
        other = primitive.attributes
        if not isinstance(other, OpaqueAttributes) or primitive.inputs != first.inputs:
            return Refusal("these are several operators")
        if replace(other, output=0) != replace(operator, output=0):
            return Refusal("these are several operators")
    make = TABLE.get(operator.op_type) if not operator.domain else None
    if make is None:
        return Refusal(f"{operator.op_type} is opaque, and PyTorch's table does not have it")
    proto = onnx.NodeProto.FromString(bytes.fromhex(operator.node))
    names = {value: name for name, value in body.inputs}
    given = iter(first.inputs)
    values = {name: next(given) for name in dict.fromkeys(proto.input) if name}
    node = Node(
        inputs=tuple(names.get(values[name], "") if name else "" for name in proto.input),
        rank=body.types[first.inputs[0]].rank,
        attributes={a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute},
        constants={
            i: body.constants[values[name]]
            for i, name in enumerate(proto.input)
            if name and values[name] in body.constants
        },
    )
    text = make(node)
    if text is None or not node.inputs[0]:
        return Refusal(f"PyTorch has no {operator.op_type} of this form")
    picked = []
    for _, value in body.outputs:
        own = attributes[value]
        if not isinstance(own, OpaqueAttributes):
            raise AssertionError("an opaque primitive without its attributes")
        picked.append(f"results[{own.output}].contiguous()")
    return f"    results = {text}\n    return {', '.join(picked)},\n"
