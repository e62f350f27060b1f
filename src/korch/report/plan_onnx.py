"""A plan as an ONNX model: each kernel is a local function of ONNX operators, with its cost.

Netron can show the model, and any ONNX engine can run it with the same results. This checks the plan
without Korch's kernels. The name of a value between kernels has its layout, as in `v12_acdb`. ONNX
has logical shapes only, so a change of layout becomes an Identity.
"""

import json
from collections.abc import Callable
from typing import Any

import onnx
from onnx import helper

from korch.candidate.layout import Layout
from korch.errors import UnsupportedError
from korch.primitive.as_onnx import IR_VERSION, OPSET, OnnxNodes, onnx_tensor
from korch.primitive.op import Array
from korch.primitive.ops.opaque import onnx_type
from korch.primitive.text import parse_graph
from korch.primitive.types import DType, ValueType
from korch.report.kernel import operations
from korch.runtime.record import PlanRecord, PortRecord, StepRecord

DOMAIN = "korch.kernels"


def plan_model(plan: PlanRecord, constant: Callable[[int], Array]) -> onnx.ModelProto:
    """Return the model.

    Args:
        plan: the kernels in order.
        constant: returns the packed elements of a constant, in its physical shape, by its index.

    Raises:
        UnsupportedError: a kernel has a primitive without an ONNX form.
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
                if port.place == "OUTPUT":  # parts of an output are written before the whole
                    outputs[port.at] = self._name(port)
        last = {self._name(port): port for step in plan.steps for port in step.outputs}
        for i, tensor in enumerate(plan.outputs):
            source = outputs.get(i)
            if source is None:  # the output is a copy of another output or of an input
                same = [n for n, p in last.items() if ValueType.parse(p.type) == tensor.type]
                if len(same) != 1:
                    raise UnsupportedError("an output is a copy of another value", where=f"output {tensor.name!r}")
                source = same[0]
            self.nodes.append(helper.make_node("Identity", [source], [tensor.name]))
        graph = helper.make_graph(
            self.nodes,
            "plan",
            [helper.make_tensor_value_info(t.name, onnx_type(DType(t.dtype)), t.shape) for t in plan.inputs],
            [helper.make_tensor_value_info(t.name, onnx_type(DType(t.dtype)), t.shape) for t in plan.outputs],
            list(self.initializers.values()),
        )
        model: onnx.ModelProto = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
            functions=list(self.functions.values()),
            ir_version=IR_VERSION,
            producer_name="korch",
            producer_version=plan.korch_version,
        )
        onnx.checker.check_model(model)
        return model

    def _name(self, port: PortRecord) -> str:
        """Return the name of a port's value; layouts with the same bytes have the same name."""
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
            self.initializers[name] = onnx_tensor(name, array, type_.dtype)
        return name

    def _step(self, number: int, step: StepRecord) -> None:
        text = step.primitives
        while text.startswith("#"):
            text = text.partition("\n")[2]
        body = parse_graph(text)
        name = f"kernel_{number}"
        function = OnnxNodes(body, f"kernel {number} of {step.provider}")
        nodes, ends = function.nodes(), ([n for n, _ in body.inputs], [n for n, _ in body.outputs])
        opsets = [helper.make_opsetid(*item) for item in function.opsets.items()]
        made = helper.make_function(DOMAIN, name, *ends, nodes, opsets)
        made.doc_string = f"{operations(step)}\n{step.primitives}"
        self.functions[name] = made
        node = helper.make_node(
            name,
            [self._name(port) for port in step.inputs],
            [self._name(port) for port in step.outputs],
            domain=DOMAIN,
            name=f"{number}",
        )
        facts = {
            "provider": step.provider,
            "variant": step.variant,
            "cost_ns": step.cost_ns,
            "bound_ns": step.bound_ns,
            "is_measured": step.is_measured,
            "bytes": step.size_bytes,
            "flop": step.work_flop,
            "from": ", ".join(filter(None, step.origins)),
            "layouts": f"{[p.layout for p in step.inputs]} -> {[p.layout for p in step.outputs]}",
        }
        for proto in (node, made):
            helper.set_metadata_props(proto, {k: str(v) for k, v in facts.items()})
        self.nodes.append(node)


def metadata(model: onnx.ModelProto) -> dict[str, dict[str, Any]]:
    """Return the facts of each kernel of such a model, by the function's name."""
    return {function.name: {p.key: _value(p.value) for p in function.metadata_props} for function in model.functions}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
