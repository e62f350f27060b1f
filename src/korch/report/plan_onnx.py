"""A plan as an ONNX model: each kernel is a local function of ONNX operators, its cost beside it.

It opens in Netron, and whatever runs ONNX runs it and must agree with the plan: a check of the
orchestration that shares nothing with Korch's own kernels. A value that kernels hand to each other
in a layout is named `v12_acdb`; ONNX has logical shapes only, so a change of layout is an Identity.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from korch.candidate.layout import Layout
from korch.errors import UnsupportedError
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.linear import ConvAttributes, ConvTransposeAttributes
from korch.primitive.ops.opaque import OpaqueAttributes, onnx_type
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes
from korch.primitive.ops.winograd import TRANSFORMS, WinogradAttributes, tile_counts
from korch.primitive.text import parse_graph
from korch.primitive.types import DType, ValueType
from korch.report.kernel import operations
from korch.runtime.record import PlanRecord, PortRecord, StepRecord

OPSET = 20
IR_VERSION = 10
DOMAIN = "korch.kernels"

_SAME = {
    "neg": "Neg", "abs": "Abs", "sign": "Sign", "reciprocal": "Reciprocal", "sqrt": "Sqrt",
    "exp": "Exp", "log": "Log", "erf": "Erf", "tanh": "Tanh", "sigmoid": "Sigmoid", "sin": "Sin",
    "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "floor": "Floor",
    "ceil": "Ceil", "round": "Round", "not": "Not", "bitwise_not": "BitwiseNot", "add": "Add",
    "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "max": "Max", "min": "Min",
    "and": "And", "or": "Or", "xor": "Xor", "bitwise_and": "BitwiseAnd",
    "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor", "equal": "Equal", "less": "Less",
    "less_equal": "LessOrEqual", "isnan": "IsNaN", "isinf": "IsInf", "where": "Where",
    "matmul": "MatMul",
}  # fmt: skip
_REDUCE = {"reduce_sum": "ReduceSum", "reduce_prod": "ReduceProd", "reduce_max": "ReduceMax",
           "reduce_min": "ReduceMin"}  # fmt: skip
_POOL = {"pool_sum": ("Add", 0.0), "pool_prod": ("Mul", 1.0), "pool_max": ("Max", -np.inf),
         "pool_min": ("Min", np.inf)}  # fmt: skip


def plan_model(plan: PlanRecord, constant: Callable[[int], Array]) -> onnx.ModelProto:
    """Return the model.

    Args:
        plan: the kernels in order.
        constant: the packed elements of a constant by its position, in its physical shape.

    Raises:
        UnsupportedError: a kernel computes what has no form in ONNX here; it says which.
    """
    return _Plan(plan, constant).model()


class _Plan:
    def __init__(self, plan: PlanRecord, constant: Callable[[int], Array]) -> None:
        self.plan = plan
        self.constant = constant
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.functions: dict[str, onnx.FunctionProto] = {}
        self.nodes: list[onnx.NodeProto] = []

    def model(self) -> onnx.ModelProto:
        plan = self.plan
        outputs: dict[int, str] = {}
        for number, step in enumerate(plan.steps):
            self._step(number, step)
            for port in step.outputs:
                if port.place == "OUTPUT":
                    outputs[port.at] = self._name(port)
        last = {self._name(port): port for step in plan.steps for port in step.outputs}
        for i, tensor in enumerate(plan.outputs):
            source = outputs.get(i)
            if source is None:  # a copy of what another output or an input is
                same = [n for n, p in last.items() if ValueType.parse(p.type) == tensor.type]
                if len(same) != 1:
                    raise UnsupportedError("an output is a copy of another value",
                                           where=f"output {tensor.name!r}")  # fmt: skip
                source = same[0]
            self.nodes.append(helper.make_node("Identity", [source], [tensor.name]))
        graph = helper.make_graph(
            self.nodes, "plan",
            [helper.make_tensor_value_info(t.name, onnx_type(DType(t.dtype)), t.shape)
             for t in plan.inputs],
            [helper.make_tensor_value_info(t.name, onnx_type(DType(t.dtype)), t.shape)
             for t in plan.outputs],
            list(self.initializers.values()),
        )  # fmt: skip
        model: onnx.ModelProto = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
            functions=list(self.functions.values()), ir_version=IR_VERSION, producer_name="korch",
            producer_version=plan.korch_version,
        )  # fmt: skip
        onnx.checker.check_model(model)
        return model

    def _name(self, port: PortRecord) -> str:
        """Return the name of what a port holds; layouts with the same bytes are one."""
        if port.place == "INPUT":
            return self.plan.inputs[port.at].name
        if port.place == "CONSTANT":
            return self._initializer(port)
        layout = Layout.parse(port.layout).normalized(ValueType.parse(port.type).shape)
        return f"v{port.value}_{layout}".rstrip("_")

    def _initializer(self, port: PortRecord) -> str:
        type_ = ValueType.parse(port.type)
        name = f"c{port.at}"
        if name not in self.initializers:
            layout = Layout.parse(port.layout)
            array = layout.unpack(self.constant(port.at), type_.shape)
            self.initializers[name] = _tensor(name, array, type_.dtype)
        return name

    def _step(self, number: int, step: StepRecord) -> None:
        text = step.primitives
        while text.startswith("#"):
            text = text.partition("\n")[2]
        body = parse_graph(text)
        name = f"kernel_{number}"
        function = _Function(body, f"kernel {number} of {step.provider}")
        made = helper.make_function(
            DOMAIN, name, [n for n, _ in body.inputs], [n for n, _ in body.outputs],
            function.nodes(), [helper.make_opsetid("", OPSET)],
        )  # fmt: skip
        made.doc_string = f"{operations(step)}\n{step.primitives}"
        self.functions[name] = made
        node = helper.make_node(
            name, [self._name(port) for port in step.inputs],
            [self._name(port) for port in step.outputs], domain=DOMAIN, name=f"{number}",
        )  # fmt: skip
        facts = {
            "provider": step.provider, "variant": step.variant, "cost_ns": step.cost_ns,
            "bound_ns": step.bound_ns, "is_measured": step.is_measured, "bytes": step.size_bytes,
            "flop": step.work_flop, "from": ", ".join(filter(None, step.origins)),
            "layouts": f"{[p.layout for p in step.inputs]} -> {[p.layout for p in step.outputs]}",
        }  # fmt: skip
        for proto in (node, made):
            helper.set_metadata_props(proto, {k: str(v) for k, v in facts.items()})
        self.nodes.append(node)


class _Function:
    """The ONNX nodes of one kernel's primitives."""

    def __init__(self, body: PrimitiveGraph, where: str) -> None:
        self.body = body
        self.where = where
        self.made: list[onnx.NodeProto] = []
        self.names = {value: name for name, value in body.inputs}
        self.count = 0

    def nodes(self) -> list[onnx.NodeProto]:
        body = self.body
        for value, constant in body.constants.items():
            self.names[value] = self.literal(constant.array, body.types[value].dtype)
        for primitive in body.primitives:
            self.names[primitive.output] = self.primitive(primitive)
        for name, value in body.outputs:
            self.made.append(helper.make_node("Identity", [self.names[value]], [name]))
        return self.made

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        self.count += 1
        name = f"t{self.count}"
        self.made.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def literal(self, array: Array, dtype: DType) -> str:
        """Return the name of a constant."""
        uniform = array.size > 1 and not any(array.strides)
        if uniform:
            one = self.add("Constant", [], value=_tensor("one", array.reshape(-1)[:1], dtype))
            return self.add("Expand", [one, self.integers(array.shape)])
        return self.add("Constant", [], value=_tensor("value", array, dtype))

    def integers(self, values: Sequence[int]) -> str:
        """Return the name of a constant of 64-bit integers."""
        return self.literal(np.array(values, np.int64).reshape(-1), DType.I64)

    def primitive(self, p: Primitive) -> str:
        """Add the nodes of a primitive; return the name of its output."""
        inputs = [self.names[v] for v in p.inputs]
        types = [self.body.types[v] for v in p.inputs]
        if p.op in _SAME:
            return self.add(_SAME[p.op], inputs)
        if p.op == "mod":
            return self.add("Mod", inputs, fmod=int(types[0].dtype.is_float))
        if p.op in ("shift_left", "shift_right"):
            return self.add("BitShift", inputs, direction=p.op[6:].upper())
        match p.attributes:
            case CastAttributes(to):
                return self.add("Cast", inputs, to=onnx_type(DType(to)))
            case ReduceAttributes(axes) if p.op in _REDUCE:
                return self.add(_REDUCE[p.op], [inputs[0], self.integers(axes)], keepdims=1)
            case BroadcastAttributes(shape):
                return self.add("Expand", [inputs[0], self.integers(shape)])
            case ReshapeAttributes(shape):
                return self.add("Reshape", [inputs[0], self.integers(shape)], allowzero=1)
            case TransposeAttributes(()):
                return self.add("Identity", inputs)
            case TransposeAttributes(perm):
                return self.add("Transpose", inputs, perm=list(perm))
            case SliceAttributes(start, size, step):
                return self.slice(inputs[0], start, size, step)
            case PadAttributes(before, after, mode, fill):
                value = self.literal(np.array(fill, types[0].dtype.numpy), types[0].dtype)
                given = [value] if mode == "constant" else []
                pads = self.integers([*before, *after])
                return self.add("Pad", [inputs[0], pads, *given], mode=mode)
            case ConcatAttributes(axis):
                return self.add("Concat", inputs, axis=axis)
            case TakeAttributes(axis, indices):
                return self.add("Gather", [inputs[0], self.integers(indices)], axis=axis)
            case ConvAttributes(strides, begin, end, dilations, groups):
                return self.add("Conv", inputs, strides=strides, pads=[*begin, *end],
                                dilations=dilations, group=groups)  # fmt: skip
            case ConvTransposeAttributes(strides, begin, end, dilations, extra, groups):
                return self.add("ConvTranspose", inputs, strides=strides, pads=[*begin, *end],
                                dilations=dilations, output_padding=extra, group=groups
                                )  # fmt: skip
            case PoolAttributes() if p.op in _POOL:
                return self.pool(p, inputs[0], types[0])
            case WinogradAttributes():
                return self.winograd(p, inputs, types)
            case OpaqueAttributes():
                return self.opaque(p.attributes, inputs)
        raise UnsupportedError(f"{p.op} has no form in ONNX here", where=self.where)

    def slice(self, name: str, start: Sequence[int], size: Sequence[int], step: Sequence[int]
              ) -> str:  # fmt: skip
        """Add a slice of all axes."""
        ends = [s + n * k for s, n, k in zip(start, size, step, strict=True)]
        ends = [e if e >= 0 else np.iinfo(np.int64).min for e in ends]  # past the first element
        axes = range(len(start))
        return self.add("Slice", [name, *map(self.integers, (start, ends, axes, step))])

    def pool(self, p: Primitive, name: str, type_: ValueType) -> str:
        """Add a window's taps as slices of what is padded, combined one after another."""
        at = p.attributes
        if not isinstance(at, PoolAttributes):
            raise AssertionError("a pool without its attributes")
        op, fill = _POOL[p.op]
        lead = type_.rank - len(at.kernel)
        if any((*at.pads_begin, *at.pads_end)):
            zeros = [0] * lead
            value = self.literal(np.array(fill, type_.dtype.numpy), type_.dtype)
            pads = self.integers([*zeros, *at.pads_begin, *zeros, *at.pads_end])
            name = self.add("Pad", [name, pads, value])
        out = self.body.types[p.output].shape
        found = ""
        for tap in itertools.product(*map(range, at.kernel)):
            start = [0] * lead + [t * d for t, d in zip(tap, at.dilations, strict=True)]
            part = self.slice(name, start, out, [*([1] * lead), *at.strides])
            found = self.add(op, [found, part]) if found else part
        return found

    def winograd(self, p: Primitive, inputs: Sequence[str], types: Sequence[ValueType]) -> str:
        """Add transforms as depthwise convolutions with the steps of tiles, and the products."""
        at = p.attributes
        if not isinstance(at, WinogradAttributes):
            raise AssertionError("winograd without its attributes")
        m, points, t = at.tile, (at.tile + 2) ** 2, TRANSFORMS[at.tile]
        (n, c, height, width), o = types[0].shape, types[1].shape[3]
        out = self.body.types[p.output].shape
        down, across = tile_counts(out, m)
        dtype = types[0].dtype
        ends = [down * m + 2 - height - at.pads_begin[0], across * m + 2 - width - at.pads_begin[1]]
        x = self.add("Pad", [inputs[0], self.integers([0, 0, *at.pads_begin, 0, 0, *ends])])
        there = np.einsum("ai,bj->abij", t.data, t.data).reshape(points, 1, m + 2, m + 2)
        weights = np.tile(there, (c, 1, 1, 1)).astype(dtype.numpy)
        v = self.add("Conv", [x, self.literal(weights, dtype)], strides=[m, m], group=c)
        v = self.add("Reshape", [v, self.integers([n, c, points, down * across])])
        v = self.add("Transpose", [v], perm=[2, 0, 3, 1])  # points, images, tiles, channels
        v = self.add("Reshape", [v, self.integers([points, n * down * across, c])])
        u = self.add("Reshape", [inputs[1], self.integers([points, c, o])])
        y = self.add("MatMul", [v, u])
        y = self.add("Reshape", [y, self.integers([points, n, down, across, o])])
        y = self.add("Transpose", [y], perm=[1, 4, 0, 2, 3])
        y = self.add("Reshape", [y, self.integers([n, o * points, down, across])])
        back = np.einsum("pa,qb->abpq", t.output, t.output).reshape(points, 1, m, m)
        weights = np.tile(back, (o, 1, 1, 1)).astype(dtype.numpy)
        y = self.add("ConvTranspose", [y, self.literal(weights, dtype)], strides=[m, m], group=o)
        return self.slice(y, [0] * 4, out, [1] * 4)

    def opaque(self, at: OpaqueAttributes, inputs: Sequence[str]) -> str:
        """Add the model's own node."""
        if at.domain:
            raise UnsupportedError(f"{at.domain}::{at.op_type} is not ONNX's own", self.where)
        node = onnx.NodeProto.FromString(bytes.fromhex(at.node))
        self.count += 1
        given = iter(inputs)
        unique = {name: next(given) for name in dict.fromkeys(node.input) if name}
        names = [unique.get(name, "") for name in node.input]
        node.ClearField("input")
        node.input.extend(names)
        outputs = [f"t{self.count}_{i}" if name else "" for i, name in enumerate(node.output)]
        node.ClearField("output")
        node.output.extend(outputs)
        self.made.append(node)
        return outputs[at.output]


def _tensor(name: str, array: Array, dtype: DType) -> onnx.TensorProto:
    dense = np.ascontiguousarray(array, dtype.numpy)
    if dense.dtype == ml_dtypes.bfloat16:
        dense = dense.view(np.uint16)
    made: onnx.TensorProto = helper.make_tensor(
        name, onnx_type(dtype), np.shape(array), dense.tobytes(), raw=True
    )
    return made


def metadata(model: onnx.ModelProto) -> dict[str, dict[str, Any]]:
    """Return the facts of each kernel of such a model, by the function's name."""
    return {
        function.name: {p.key: _value(p.value) for p in function.metadata_props}
        for function in model.functions
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
