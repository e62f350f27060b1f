"""Runs opaque operators on CUDA devices by calls of PyTorch that have the same semantics.

Operators that are not in `korch.primitive.torch_calls` are refused and run on the host.
"""

import re
from collections.abc import Sequence

import numpy as np
import onnx

from korch.candidate.candidate import Group, Offer, Refusal
from korch.cuda.kernel import CudaKernel, TorchCall
from korch.cuda.target import CudaTarget
from korch.primitive.graph import Constant
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.torch_calls import TABLE, Node
from korch.primitive.torch_calls.node import TORCH_TYPES
from korch.primitive.types import DType, ValueType
from korch.provider.content import content_version
from korch.provider.opaque import is_one_node, node_of
from korch.system.content_name import content_name


class TorchOpaqueProvider:
    """Makes kernels that call PyTorch for opaque operators."""

    name = "torch-opaque"
    version = content_version("primitive/torch_calls")
    group_shapes = ()
    runs_opaque = True

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer an operator that is in the table, in plain layouts."""
        found = _call(group)
        if isinstance(found, Refusal):
            return found
        return (Offer(*group.plain_layouts),)

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Return a kernel that consists of a Python function with the calls."""
        text = _call(group)
        if isinstance(text, Refusal):
            return text
        arguments = ", ".join(["torch", *(name for name, _ in group.body.inputs), "kept={}"])
        source = f"def NAME({arguments}):\n{text}"
        symbol = content_name("t", source)
        return CudaKernel((TorchCall(symbol, source.replace("NAME", symbol)),))


def _call(group: Group) -> str | Refusal:
    """Return the body of the kernel's Python function, or why there is none."""
    body = group.body
    if not body.primitives or any(p.op != "opaque" for p in body.primitives):
        return Refusal("only opaque operators are run as calls of PyTorch")
    if not is_one_node(body.primitives):
        return Refusal("these are several operators")
    operator = node_of(body.primitives[0])
    make = TABLE.get(operator.op_type) if not operator.domain else None
    if make is None:
        return Refusal(f"{operator.op_type} is opaque, and PyTorch's table does not have it")
    node = _node(group, operator)
    text = make(node) if body.inputs else None
    if text is None:
        return Refusal(f"PyTorch has no {operator.op_type} of this form")
    first_name = body.inputs[0][0]
    lines: list[str] = []
    for i, array in node.constants.items():
        if re.search(rf"\bc{i}\b", text):
            lines += _known(f"c{i}", Constant.of(array), first_name)
    *statements, result = text.splitlines()
    lines += [*statements, f"results = {result}"]
    number = {p.output: node_of(p).output for p in body.primitives}
    picked = [f"results[{number[value]}].contiguous()" for _, value in body.outputs]
    # A result that is a view of an input is copied: otherwise overwriting the input would change the result.
    given = ", ".join(name for name, _ in body.inputs)
    lines += [
        "def memory(tensor): return tensor.untyped_storage().data_ptr()",
        f"given = {{memory(tensor) for tensor in ({given},)}}",
        f"results = ({', '.join(picked)},)",
        "return tuple(y.clone() if memory(y) in given else y for y in results)",
    ]
    return "".join(f"    {line}\n" for line in lines)


def _node(group: Group, operator: OpaqueAttributes) -> Node:
    """Return the operator of a group in the form that the table's rows take."""
    body = group.body
    first = body.primitives[0]
    proto = onnx.NodeProto.FromString(bytes.fromhex(operator.node))
    names = {value: name for name, value in body.inputs}
    given = iter(first.inputs)
    values = {name: next(given) for name in dict.fromkeys(proto.input) if name}
    known = {i: values[name] for i, name in enumerate(proto.input) if values.get(name) in body.constants}
    return Node(
        inputs=tuple(
            (f"c{i}" if i in known else names[values[name]]) if name else "" for i, name in enumerate(proto.input)
        ),
        types=tuple(body.types[values[name]] if name else None for name in proto.input),
        outputs=tuple(ValueType.parse(text) if text else None for text in operator.outputs),
        attributes={a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute},
        constants={i: body.constants[value].array for i, value in known.items()},
        version=operator.opset,
    )


def _known(name: str, constant: Constant, beside: str) -> list[str]:
    """Return statements that define a constant. It is created in the first run, before a CUDA graph is captured."""
    dtype = DType.of(constant.array.dtype)
    kind, shape = f"torch.{TORCH_TYPES[dtype.value]}", list(constant.array.shape)
    if not constant.array.size:
        made = f"torch.zeros({shape}, dtype={kind})"
    elif constant.is_uniform:
        data = np.ascontiguousarray(constant.array.reshape(-1)[:1]).tobytes().hex()
        made = f"torch.frombuffer(bytearray.fromhex({data!r}), dtype={kind})"
        made += f".reshape({[1] * len(shape)}).expand({shape})"
    else:
        data = np.ascontiguousarray(constant.array).tobytes().hex()
        made = f"torch.frombuffer(bytearray.fromhex({data!r}), dtype={kind}).reshape({shape})"
    return [f"if {name!r} not in kept:", f"    kept[{name!r}] = {made}.to({beside}.device)", f"{name} = kept[{name!r}]"]
