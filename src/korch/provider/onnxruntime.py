"""Kernels of ONNX Runtime: an opaque operator, run as a session that contains only this node.

With them, Korch runs every model that ONNX Runtime runs: the rest of the graph is optimized around
such operators. The kernel is native: its source contains the node's model as bytes, and
`korch_onnxruntime.c` calls the library's C interface on Korch's own buffers.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import onnx

from korch.candidate.candidate import Group, Offer, Refusal
from korch.errors import excerpt
from korch.primitive.graph import Constant, Primitive
from korch.primitive.ops.opaque import onnx_type, opaque_model
from korch.primitive.types import ValueType
from korch.provider.content import content_version
from korch.provider.opaque import is_one_node, node_of
from korch.provider.provider import Kernel, named_kernel
from korch.provider.top import orders_nan
from korch.system.extras import install_command
from korch.system.libraries import ONNXRUNTIME, find_onnxruntime
from korch.target import Target
from korch.tile.llvm.constants import Constants

MOST_MODEL_BYTES = 1 << 18
"""The largest model of a node, whose attributes may hold tensors, as it is part of the kernel's source."""

MOST_CONSTANT_ELEMENTS = 4096
"""Larger uniform constants are created by the session instead of being written out in the source."""


class OnnxRuntimeProvider:
    """ONNX Runtime's kernels for opaque operators.

    Raises:
        ImportError: ONNX Runtime or its shared library is not installed.
    """

    name = "onnxruntime"
    group_shapes = ()
    runs_opaque = True

    def __init__(self) -> None:
        if importlib.util.find_spec("onnxruntime") is None or find_onnxruntime() is None:
            raise ImportError(f"ONNX Runtime is not installed; {install_command('onnxruntime')}")
        self.version = f"{importlib.metadata.version('onnxruntime')}-{content_version()}"

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer one opaque operator in plain layouts, with any subset of its outputs."""
        nodes = _nodes(group)
        if isinstance(nodes, Refusal):
            return nodes
        if orders_nan(group, target):
            return Refusal("it has no order of the smallest elements if there is NaN; Korch's kernel has")
        model = _model(group, nodes[0]).SerializeToString(deterministic=True)
        if len(model) > MOST_MODEL_BYTES:
            return Refusal(f"the node holds {len(model)} bytes, at most {MOST_MODEL_BYTES} go in")
        reason = _session_error(model)
        if reason is not None:
            return Refusal(f"ONNX Runtime: {reason}")
        return [Offer(*group.plain_layouts)]

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Return a kernel that runs the node in a session."""
        nodes = _nodes(group)
        if isinstance(nodes, Refusal):
            return nodes
        model = _model(group, nodes[0]).SerializeToString(deterministic=True)
        text = _print_source(group, nodes, model, target.isa)
        return named_kernel(text, has_state=True, opens=(ONNXRUNTIME,))


def _nodes(group: Group) -> list[Primitive] | Refusal:
    """Return the opaque primitive of each output of the group, or a refusal if these are not of one node."""
    primitives = group.body.primitives
    if not primitives or any(p.op != "opaque" for p in primitives):
        return Refusal("only opaque operators are run by ONNX Runtime")
    if not is_one_node(primitives):
        return Refusal("these are several operators")
    by_value = {p.output: p for p in primitives}
    return [by_value[value] for _, value in group.body.outputs]


def _model(group: Group, primitive: Primitive) -> onnx.ModelProto:
    """Return the node as a model, which includes the constants of the group's body."""
    model = opaque_model(node_of(primitive))
    inside = {
        f"x{i}": group.body.constants[value]
        for i, value in enumerate(primitive.inputs)
        if value in group.body.constants
    }
    kept = [info for info in model.graph.input if info.name not in inside]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for name, constant in inside.items():
        _add_constant(model.graph, name, constant)
    model.graph.node.extend(nodes)
    return model


def _add_constant(graph: onnx.GraphProto, name: str, constant: Constant) -> None:
    if constant.array.size <= MOST_CONSTANT_ELEMENTS:
        dense = np.ascontiguousarray(constant.array).reshape(constant.array.shape)
        graph.initializer.append(onnx.numpy_helper.from_array(dense, name))
        return
    shape = np.array(constant.array.shape, np.int64)
    graph.initializer.append(onnx.numpy_helper.from_array(shape, f"{name}_shape"))
    element = np.asarray(constant.scalar).reshape(1)
    value = onnx.numpy_helper.from_array(element, "value")
    node = onnx.helper.make_node("ConstantOfShape", [f"{name}_shape"], [name], value=value)
    graph.node.append(node)


@lru_cache(maxsize=4096)
def _session_error(model: bytes) -> str | None:
    """Return why ONNX Runtime can't prepare a model, or None if it can."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its exceptions share no other base class
        return excerpt(error)
    return None


def _print_source(group: Group, nodes: Sequence[Primitive], model: bytes, isa: str) -> str:
    position = group.position
    tensors: dict[str, tuple[int, ValueType]] = {}
    for i, value in enumerate(nodes[0].inputs):
        if value in position:
            tensors[f"x{i}"] = (position[value], group.body.types[value])
    input_count = len(tensors)
    for i, primitive in enumerate(nodes):
        name = f"y{node_of(primitive).output}"
        tensors[name] = (len(group.inputs) + i, group.output_types[i])
    made = Constants(isa)
    rows = []
    for name, (buffer, type_) in tensors.items():
        shape = made.numbers(f"shape_{name}", [(n,) for n in type_.shape])
        numbers = f"i64 {buffer}, i64 {onnx_type(type_.dtype)}, i64 {type_.size_bytes}"
        rows.append(f"{{ {numbers}, {shape} }}")
    names = made.table("names", "ptr", [made.string(name).removeprefix("ptr ") for name in tensors])
    table = made.table("tensors", "{ i64, i64, i64, i64, ptr }", rows)
    fields = [made.block("model", model), f"i64 {len(model)}", table, names, f"i64 {input_count}"]
    return made.kernel("korch_onnxruntime", fields, ("create", "run", "destroy"), group.text)
