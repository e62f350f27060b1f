"""Blocks of experts with seeded weights: as modules of the transformers library, and as ONNX models in four forms.

`gather` multiplies each row by gathered weights, as `torch.export` writes the library's blocks. `dense` computes all
experts and adds their outputs with weights. `loop` finds the rows of each expert with `NonZero`, one expert after
another. `operator` is `com.microsoft.MoE`. All forms compute the same function; engines differ in which is fastest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Block:
    """Sizes of a block."""

    hidden: int  # the width of a token
    inner: int  # the inner width of an expert
    experts: int  # the number of experts
    chosen: int  # the number of experts that compute each token
    shared: int = 0  # the inner width of an expert that computes all tokens; 0 if there is none

    def gathered_bytes(self, tokens: int) -> int:
        """Return the bytes of the gate and up weights that are gathered for a number of tokens."""
        return 4 * tokens * self.chosen * 2 * self.inner * self.hidden


BLOCKS = {"mixtral": Block(640, 2240, 8, 2), "qwen": Block(512, 352, 60, 4, 1408)}
"""The widths have the ratios of Mixtral 8x7B and of Qwen1.5-MoE-A2.7B; the weights have 137 and 139 MB."""


def module_of(name: str, form: str = "eager") -> Any:
    """Return a block as a module; `form` names the library's implementation of experts."""
    import torch

    torch.manual_seed(0)
    block = BLOCKS[name]
    if name == "mixtral":
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config: Any = MixtralConfig(
            hidden_size=block.hidden,
            intermediate_size=block.inner,
            num_local_experts=block.experts,
            num_experts_per_tok=block.chosen,
        )
        module: Any = MixtralSparseMoeBlock(config)
    else:
        from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
        from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

        config = Qwen2MoeConfig(
            hidden_size=block.hidden,
            moe_intermediate_size=block.inner,
            shared_expert_intermediate_size=block.shared,
            num_experts=block.experts,
            num_experts_per_tok=block.chosen,
        )
        module = Qwen2MoeSparseMoeBlock(config)
    config._experts_implementation = form
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module.eval()


def tokens_of(name: str, count: int) -> Array:
    """Return the input of a block: random tokens, seeded by their number."""
    rng = np.random.default_rng(count)
    return rng.standard_normal((1, count, BLOCKS[name].hidden)).astype(np.float32)


class _Nodes:
    """The nodes and constants of a model."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def constant(self, array: Any) -> str:
        """Return the name of a constant."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.ascontiguousarray(array)
        return name

    def add(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Add a node; return the names of its outputs."""
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def ints(self, *numbers: int) -> str:
        """Return the name of a constant of integers."""
        return self.constant(np.array(numbers, np.int64))

    def gated(self, both: str) -> str:
        """Add silu(first half) * second half."""
        gate, up = self.add("Split", both, outputs=2, axis=-1, num_outputs=2)
        return str(self.add("Mul", self.add("Mul", gate, self.add("Sigmoid", gate)), up))


Form = Callable[[_Nodes, Block, "Weights", str, str], str]


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of all experts, and the names of the probabilities and numbers of each token's chosen experts."""

    up: Array
    down: Array
    chances: str
    numbers: str
    tokens: int


def _gather(g: _Nodes, block: Block, w: Weights, x: str, logits: str) -> str:
    rows = w.tokens * block.chosen
    wide = g.add("Expand", g.add("Unsqueeze", x, g.ints(1)), g.ints(w.tokens, block.chosen, block.hidden))
    index = g.add("Reshape", w.numbers, g.ints(rows))
    inner = g.add("Gather", g.constant(w.up), index, axis=0)
    both = g.add("MatMul", inner, g.add("Reshape", wide, g.ints(rows, block.hidden, 1)))
    gated = g.gated(g.add("Squeeze", both, g.ints(2)))
    outer = g.add("Gather", g.constant(w.down), index, axis=0)
    y = g.add("Squeeze", g.add("MatMul", outer, g.add("Unsqueeze", gated, g.ints(2))), g.ints(2))
    y = g.add("Mul", y, g.add("Reshape", w.chances, g.ints(rows, 1)))
    y = g.add("Reshape", y, g.ints(w.tokens, block.chosen, block.hidden))
    return str(g.add("ReduceSum", y, g.ints(1), keepdims=0))


def _dense(g: _Nodes, block: Block, w: Weights, x: str, logits: str) -> str:
    both = g.add("MatMul", g.add("Unsqueeze", x, g.ints(0)), g.constant(w.up.transpose(0, 2, 1)))
    y = g.add("MatMul", g.gated(both), g.constant(w.down.transpose(0, 2, 1)))
    zeros = g.constant(np.zeros((w.tokens, block.experts), np.float32))
    shares = g.add("ScatterElements", zeros, w.numbers, w.chances, axis=1)
    shares = g.add("Unsqueeze", g.add("Transpose", shares, perm=[1, 0]), g.ints(2))
    return str(g.add("ReduceSum", g.add("Mul", y, shares), g.ints(0), keepdims=0))


def _loop(g: _Nodes, block: Block, w: Weights, x: str, logits: str) -> str:
    y = g.constant(np.zeros((w.tokens, block.hidden), np.float32))
    for expert in range(block.experts):
        places = g.add("NonZero", g.add("Equal", w.numbers, g.constant(np.int64(expert))))
        places = g.add("Transpose", places, perm=[1, 0])
        rows = g.add("Slice", places, g.ints(0), g.ints(1), g.ints(1))
        own = g.add("GatherND", x, rows)
        both = g.add("MatMul", own, g.constant(w.up[expert].T))
        out = g.add("MatMul", g.gated(both), g.constant(w.down[expert].T))
        share = g.add("Unsqueeze", g.add("GatherND", w.chances, places), g.ints(1))
        y = g.add("ScatterND", y, rows, g.add("Mul", out, share), reduction="add")
    return str(y)


def _operator(g: _Nodes, block: Block, w: Weights, x: str, logits: str) -> str:
    halves = w.up.reshape(block.experts, 2, block.inner, block.hidden).transpose(0, 2, 1, 3)
    up = halves.reshape(block.experts, 2 * block.inner, block.hidden)  # gate and up rows alternate
    return str(
        g.add(
            "MoE",
            *(x, logits, g.constant(up), "", g.constant(w.down)),
            domain="com.microsoft",
            k=block.chosen,
            activation_type="swiglu",
            swiglu_fusion=1,
            activation_alpha=1.0,
            activation_beta=0.0,
            normalize_routing_weights=1,
        )
    )


FORMS: dict[str, Form] = {"gather": _gather, "dense": _dense, "loop": _loop, "operator": _operator}


def onnx_of(name: str, tokens: int, form: str) -> onnx.ModelProto | None:
    """Return a block in a form of ONNX; None for `operator` and a block with a shared expert.

    The operator normalizes the chosen probabilities so that they add up to 1.
    """
    block, module = BLOCKS[name], module_of(name)
    if form == "operator" and block.shared:
        return None
    own = {key: value.detach().numpy() for key, value in module.named_parameters()}
    g = _Nodes()
    x = g.add("Reshape", "x", g.ints(tokens, block.hidden))
    logits = g.add("MatMul", x, g.constant(own["gate.weight"].T))
    chances, numbers = g.add("TopK", g.add("Softmax", logits, axis=-1), g.ints(block.chosen), outputs=2, axis=-1)
    if not block.shared:
        chances = g.add("Div", chances, g.add("ReduceSum", chances, g.ints(1), keepdims=1))
    weights = Weights(own["experts.gate_up_proj"], own["experts.down_proj"], chances, numbers, tokens)
    y = FORMS[form](g, block, weights, x, logits)
    if block.shared:
        y = _with_shared(g, own, x, y)
    g.nodes.append(helper.make_node("Reshape", [y, g.ints(1, tokens, block.hidden)], ["y"]))
    return _model(g, (1, tokens, block.hidden))


def _with_shared(g: _Nodes, own: dict[str, Array], x: str, y: str) -> str:
    gate, up = (g.add("MatMul", x, g.constant(own[f"shared_expert.{n}_proj.weight"].T)) for n in ("gate", "up"))
    inner = g.add("Mul", g.add("Mul", gate, g.add("Sigmoid", gate)), up)
    out = g.add("MatMul", inner, g.constant(own["shared_expert.down_proj.weight"].T))
    share = g.add("Sigmoid", g.add("MatMul", x, g.constant(own["shared_expert_gate.weight"].T)))
    return str(g.add("Add", y, g.add("Mul", share, out)))


def _model(g: _Nodes, shape: Sequence[int]) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("x", "y")]
    stored = [numpy_helper.from_array(array, name) for name, array in g.constants.items()]
    graph = helper.make_graph(g.nodes, "experts", infos[:1], infos[1:], stored)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)
