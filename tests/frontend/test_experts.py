"""Loops over experts that exporters write: they become products by gathered weights, or stay unchanged."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from korch.errors import UnsupportedError
from korch.fission import fission
from korch.frontend import load_model
from korch.primitive.reference import run
from korch.testing.tolerance import assert_same
from tests.support.models import in_onnxruntime

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 6, 8, 12, 4, 2


class Loop:
    """A model with one or more blocks of experts, whose parts a test can change."""

    def __init__(self, tokens: int = TOKENS, experts: int = EXPERTS) -> None:
        self.tokens, self.experts, self.classes = tokens, experts, experts
        self.rng, self.nodes, self.constants = np.random.default_rng(3), list[Any](), dict[str, Any]()
        self.reduction, self.filled = "add", 0.0
        self.chosen_by = range(experts)
        self.has_bias, self.is_apart = False, False
        self.between: Callable[[Loop, str, int], str] = lambda loop, value, expert: value

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def weights(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def block(self, x: str) -> str:
        """Add a block as the loop of the transformers library: the mask of an expert has the axes slot, token."""
        logits = self.add("MatMul", x, self.weights(WIDTH, self.classes))
        chances, numbers = self.add("TopK", self.add("Softmax", logits), self.ints(CHOSEN), outputs=2)
        wide = self.add("Unsqueeze", numbers, self.ints(2))
        hot = self.add("Cast", self.add("Equal", wide, self.ints(*range(self.classes))), to=7)
        turned, y = (
            self.add("Transpose", hot, perm=[2, 1, 0]),
            self.constant(np.zeros((self.tokens, WIDTH), np.float32)),
        )
        for expert in self.chosen_by:
            places = self.add("NonZero", self.add("Gather", turned, self.constant(np.int64(expert)), axis=0))
            slot, token = self.add(
                "Split", self.add("Transpose", places, perm=[1, 0]), axis=1, num_outputs=2, outputs=2
            )
            own = self.add("GatherND", x, token)
            inputs = (own, self.weights(INNER, WIDTH), *((self.weights(INNER),) if self.has_bias else ()))
            inner = self.add("Gemm", *inputs, transB=1)
            inner = self.between(self, self.add("Mul", inner, self.add("Sigmoid", inner)), expert)
            out = self.add("MatMul", inner, self.weights(INNER, WIDTH))
            out = self.add("Add", out, self.weights(WIDTH)) if self.has_bias else out
            share = self.add("GatherND", chances, self.add("Concat", token, slot, axis=-1))
            update = self.add("Mul", out, self.add("Unsqueeze", share, self.ints(1)))
            y = self.apart(y, token, update) if self.is_apart else self.total(y, token, update)
        return y

    def total(self, y: str, token: str, update: str) -> str:
        return str(self.add("ScatterND", y, token, update, reduction=self.reduction))

    def apart(self, y: str, token: str, update: str) -> str:
        """Add rows that are scattered to zeros, as exporters without sums of scattered rows do."""
        row = self.add("Shape", self.add("Slice", y, self.ints(0), self.ints(1), self.ints(0)))
        wide = self.add("Expand", update, row)
        zeros = self.constant(np.full((self.tokens, WIDTH), self.filled, np.float32))
        places = self.add("Expand", token, self.add("Shape", wide))
        return str(self.add("Add", y, self.add("ScatterElements", zeros, places, wide, axis=0)))

    def model(self, y: str) -> onnx.ModelProto:
        infos = [helper.make_tensor_value_info(name, 1, [self.tokens, WIDTH]) for name in ("x", "y")]
        self.nodes.append(helper.make_node("Identity", [y], ["y"]))
        stored = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "loop", infos[:1], infos[1:], stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def check(model: onnx.ModelProto, x: np.ndarray, products: int) -> None:
    """Compare with ONNX Runtime, and count the products by gathered matrices."""
    graph = fission(load_model(model))
    assert [p.op for p in graph.primitives].count("matmul_gathered") == products
    (expected,) = in_onnxruntime(model, {"x": x})
    assert_same(run(graph, {"x": x}, exact=False)["y"], expected, terms=256)


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 6, 13])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_loop_becomes_gathered_products(count: int, has_bias: bool) -> None:
    loop = Loop(count)
    loop.has_bias = has_bias
    check(loop.model(loop.block("x")), tokens(count), 2)


def test_experts_in_another_order_and_blocks_that_follow_each_other() -> None:
    loop = Loop()
    loop.chosen_by = [2, 0, 3, 1]
    check(loop.model(loop.block(loop.block("x"))), tokens(TOKENS), 4)


def test_rows_that_are_scattered_to_zeros_and_added() -> None:
    loop = Loop()
    loop.is_apart = True
    check(loop.model(loop.block(loop.block("x"))), tokens(TOKENS), 4)


def test_parts_of_rows_whose_ends_are_computed() -> None:
    loop = Loop()
    loop.between = by_half
    check(loop.model(loop.block("x")), tokens(TOKENS), 2)


def test_numbers_that_are_not_finite_stay_in_their_token() -> None:
    loop, x = Loop(), tokens(TOKENS)
    x[1, 2], x[3, 0], x[4, 4] = np.nan, np.inf, -np.inf
    model = loop.model(loop.block("x"))
    check(model, x, 2)


def mean_of_rows(loop: Loop, value: str, expert: int) -> str:
    return str(loop.add("Sub", value, loop.add("ReduceMean", value, loop.ints(0))))


def by_their_number(loop: Loop, value: str, expert: int) -> str:
    count = loop.add("Cast", loop.add("Shape", value), to=1)
    return str(loop.add("Mul", value, loop.add("Slice", count, loop.ints(0), loop.ints(1))))


def by_half(loop: Loop, value: str, expert: int) -> str:
    """Exchange the halves of each row, whose ends are computed from its shape."""
    width = loop.add("Gather", loop.add("Shape", value), loop.ints(-1), axis=0)
    half = loop.add("Div", width, loop.ints(2))
    parts = [loop.add("Slice", value, *ends, loop.ints(-1)) for ends in ((half, width), (loop.ints(0), half))]
    return str(loop.add("Concat", *parts, axis=-1))


def differing(loop: Loop, value: str, expert: int) -> str:
    return str(loop.add("Relu" if expert else "Neg", value))


def scaled(loop: Loop, value: str, expert: int) -> str:
    return str(loop.add("Mul", value, loop.constant(np.float32(expert + 1))))


def changed(**attributes: Any) -> Loop:
    loop = Loop()
    for name, value in attributes.items():
        setattr(loop, name, value)
    return loop


def joined(loop: Loop, value: str, expert: int) -> str:
    """Multiply by the number of rows and columns together."""
    size = loop.add("Cast", loop.add("Size", value), to=1)
    return str(loop.add("Mul", value, size))


REFUSED = {
    "the size of all rows counts": changed(between=joined),
    "rows are mixed": changed(between=mean_of_rows),
    "the number of rows counts": changed(between=by_their_number),
    "experts differ in an operator": changed(between=differing),
    "a scalar differs": changed(between=scaled),
    "an expert is missing": changed(chosen_by=[0, 1, 3]),
    "an expert comes twice": changed(chosen_by=[0, 1, 2, 2, 3]),
    "there are more classes": changed(classes=EXPERTS + 1),
    "rows are scattered to ones": changed(is_apart=True, filled=1.0),
    "the last one overwrites": changed(reduction="none"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_loops_stay(reason: str) -> None:
    loop = REFUSED[reason]
    model = loop.model(loop.block("x"))
    with pytest.raises(UnsupportedError, match="NonZero"):
        load_model(model)


def test_a_loop_that_shows_its_rows_stays() -> None:
    loop = Loop()
    model = loop.model(loop.block("x"))
    name = next(node.output[0] for node in model.graph.node if node.op_type == "Gemm")
    model.graph.output.append(helper.make_empty_tensor_value_info(name))
    with pytest.raises(UnsupportedError, match="NonZero"):
        load_model(model)


def test_an_index_that_is_no_result_of_topk_stays() -> None:
    loop = Loop()
    model = loop.model(loop.block("x"))
    top = next(node for node in model.graph.node if node.op_type == "TopK")
    numbers = top.output[1]
    top.output[1] = "chosen"
    place = list(model.graph.node).index(top)
    model.graph.initializer.append(numpy_helper.from_array(np.int64(1), "one"))
    shifted = helper.make_node("Add", ["chosen", "one"], [numbers])
    nodes = [*model.graph.node[: place + 1], shifted, *model.graph.node[place + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    with pytest.raises(UnsupportedError, match="NonZero"):
        load_model(model)
