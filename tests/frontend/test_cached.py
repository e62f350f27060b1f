"""Operators of attention with a cache, as static graphs: the results are those of ONNX Runtime or of the standard."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from korch.errors import ModelError, UnsupportedError
from korch.fission import fission
from korch.frontend import load_model
from korch.primitive.op import Array
from korch.primitive.reference import run
from tests.support.models import in_onnxruntime, one_operator

RNG = np.random.default_rng(3)
BATCH, HEADS, GROUPS, SIZE = 2, 4, 2, 16


def real(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int, dtype: type = np.int32) -> Array:
    return np.array(values, dtype)


def node_model(
    op: str, inputs: Mapping[int, Array], known: Sequence[int], attributes: Mapping[str, Any], opset: int
) -> onnx.ModelProto:
    """Return a model of one node; the inputs at the positions `known` are constants."""
    outputs = 3 if op == G or any(4 <= i <= 7 and a.ndim == 4 for i, a in inputs.items()) else 1
    domain, constants = "" if op == "Attention" else "com.microsoft", {i: inputs[i] for i in known}
    given = [inputs.get(i) for i in range(max(inputs) + 1)]
    return one_operator(op, given, constants=constants, opset=opset, outputs=outputs, domain=domain, **attributes)


def computed(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Return the outputs by primitives; the attention must have been split into them."""
    graph = fission(load_model(model))
    assert not [p for p in graph.primitives if p.op == "opaque" and p.attributes.op_type != "Gather"]
    found = run(graph, dict(feeds))
    return [found[name] for name, _ in graph.outputs]


def grouped(past: int, rows: int, capacity: int = 0, batch: int = 1, places: Sequence[int] = ()) -> dict[int, Array]:
    """Return inputs of a GroupQueryAttention; `places`: the last place of each sequence, if they differ."""
    held = capacity or past
    parts = {
        0: real(batch, rows, HEADS * SIZE),
        1: real(batch, rows, GROUPS * SIZE),
        2: real(batch, rows, GROUPS * SIZE),
    }
    caches = {i: real(batch, GROUPS, held, SIZE) for i in (3, 4)}
    last = ints(*(places or [past + rows - 1] * batch))
    return parts | caches | {5: last, 6: np.array(int(last.max()) + 1, np.int32)}


def turned(inputs: Mapping[int, Array], size: int = SIZE) -> dict[int, Array]:
    return {**inputs, 7: real(40, size // 2), 8: real(40, size // 2)}


def packed(inputs: Mapping[int, Array]) -> dict[int, Array]:
    return {0: np.concatenate([inputs[i] for i in range(3)], -1), **{i: a for i, a in inputs.items() if i > 2}}


G, ROTARY = "GroupQueryAttention", {"do_rotary": 1}
GROUPED: dict[str, tuple[dict[int, Array], dict[str, Any]]] = {
    "step": (grouped(5, 1), {}),
    "steps": (grouped(5, 3), {"scale": 0.3}),
    "first": (grouped(0, 6), {"local_window_size": 3}),
    "window": (grouped(7, 3), {"local_window_size": 4}),
    "cap": (grouped(5, 3), {"softcap": 2.0}),
    "packed": (packed(grouped(5, 3)), {}),
    "rotary": (turned(grouped(5, 3)), ROTARY),
    "rotary of pairs": (turned(grouped(5, 3)), {**ROTARY, "rotary_interleaved": 1}),
    "rotary positions": ({**turned(grouped(5, 3)), 9: np.array([[9, 2, 30]])}, ROTARY),
    "rotary packed": (packed(turned(grouped(5, 1))), ROTARY),
    "bias": ({**grouped(5, 3), 10: real(1, HEADS, 3, 8)}, {"softcap": 2.0}),
    "sinks": ({**grouped(5, 3), 11: real(HEADS)}, {}),
    "smooth": (grouped(5, 3), {"smooth_softmax": 1}),
    "capacity": (turned(grouped(5, 3, 12)), ROTARY),
    "capacity first": (turned(grouped(0, 3, 12)), ROTARY),
    "capacity window": (grouped(8, 1, 12), {"local_window_size": 4}),
    "capacity full": (grouped(9, 3, 12), {}),
    "ragged": (turned(grouped(7, 1, batch=3, places=[2, 7, 5])), ROTARY),
    "ragged capacity": (turned(grouped(7, 1, 12, 3, [7, 3, 5])), {**ROTARY, "local_window_size": 4}),
    "ragged first": (turned(grouped(0, 6, batch=2, places=[5, 3])), ROTARY),
}


@pytest.mark.parametrize("counts", ["known", "total", "inputs"])
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_queries_are_those_of_onnx_runtime(name, counts) -> None:
    inputs, more = GROUPED[name]
    if counts == "inputs" and "capacity" in name:
        more = {**more, "past_present_share_buffer": 1}
    known = {"known": (5, 6), "total": (6,), "inputs": ()}[counts]
    attributes = {"num_heads": HEADS, "kv_num_heads": GROUPS, **more}
    feeds = {f"x{i}": a for i, a in inputs.items() if i not in known}
    found = computed(node_model(G, inputs, known, attributes, 17), feeds)
    attributes.pop("past_present_share_buffer", None)
    wanted = in_onnxruntime(node_model(G, inputs, known, attributes, 17), feeds)
    rows = inputs[0].shape[1]
    for b, last in enumerate(inputs[5]):
        valid = min(rows, last + 1)
        np.testing.assert_allclose(found[0][b, :valid], wanted[0][b, :valid], rtol=1e-4, atol=1e-5)
        for one, other in zip(found[1:], wanted[1:], strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one[b, :, : last + 1], other[b, :, : last + 1], rtol=1e-4, atol=1e-5)


def heads(past: int, rows: int, keys: int = 0, batch: int = BATCH) -> dict[int, Array]:
    """Return inputs of a MultiHeadAttention."""
    inputs = {0: real(batch, rows, HEADS * SIZE)} | {i: real(batch, keys or rows, HEADS * SIZE) for i in (1, 2)}
    return inputs | ({i: real(batch, HEADS, past, SIZE) for i in (6, 7)} if past else {})


def of_parts(*parts: Array) -> Array:
    """Return features of several parts beside each other, head by head."""
    split = [part.reshape(*part.shape[:2], HEADS, 1, SIZE) for part in parts]
    return np.concatenate(split, 3)


def unpacked(inputs: dict[int, Array]) -> dict[int, Array]:
    """Return inputs of a MultiHeadAttention with queries, keys and values apart, as ONNX Runtime needs them."""
    found = [part for a in inputs.values() for part in (np.split(a, a.shape[3], 3) if a.ndim == 5 else [a])]
    return {i: a.reshape(*a.shape[:2], -1) for i, a in enumerate(found)}


def masked(length: int) -> dict[int, Array]:
    """Return inputs of a DecoderMaskedMultiHeadAttention with a capacity of 12 rows."""
    inputs = {i: real(BATCH, 1, HEADS * SIZE) for i in range(3)}
    return inputs | {i: real(BATCH, HEADS, 12, SIZE) for i in (5, 6)} | {7: ints(length)}


H, M = "MultiHeadAttention", "DecoderMaskedMultiHeadAttention"
PADDING = RNG.integers(0, 2, (BATCH, 8)).astype(np.int32)
PADDING[:, 0] = 1
SHARED = {"past_present_share_buffer": 1}
MANY: dict[str, tuple[str, dict[int, Array], dict[str, Any]]] = {
    "past": (H, heads(5, 3), {}),
    "first": (H, heads(0, 4), {"unidirectional": 1, "scale": 0.3}),
    "causal past": (H, heads(5, 3), {"unidirectional": 1}),
    "biases": (H, {**heads(5, 1), 3: real(3 * HEADS * SIZE)}, {}),
    "bias of scores": (H, {**heads(5, 3), 5: real(1, HEADS, 3, 8)}, {}),
    "padding": (H, {**heads(5, 3), 4: PADDING}, {}),
    "lengths": (H, {**heads(0, 4), 4: ints(4, 2)}, {"mask_filter_value": -5000.0}),
    "padding of rows": (H, {**heads(0, 8), 4: np.tril(np.ones((BATCH, 8, 8), np.int32))}, {}),
    "packed": (H, {0: of_parts(*(real(BATCH, 4, HEADS * SIZE) for _ in range(3)))}, {}),
    "packed keys": (H, {0: real(BATCH, 3, HEADS * SIZE), 1: of_parts(*(real(BATCH, 6, HEADS * SIZE),) * 2)}, {}),
    "cross": (H, {0: real(BATCH, 3, HEADS * SIZE), **{i: real(BATCH, HEADS, 6, SIZE) for i in (1, 2)}}, {}),
    "capacity": (M, masked(5), SHARED),
    "capacity biases": (M, {**masked(5), 10: real(3 * HEADS * SIZE)}, SHARED),
    "capacity bias of scores": (M, {**masked(5), 4: real(1, HEADS, 1, 6)}, SHARED),
    "capacity full": (M, masked(11), SHARED),
}


@pytest.mark.parametrize("name", ["rotary", "sinks", "bias", "cap"])
def test_halves_are_those_of_onnx_runtime(name) -> None:
    inputs, more = GROUPED[name]
    inputs = {i: a.astype(np.float16) if a.dtype == np.float32 else a for i, a in inputs.items()}
    model = node_model(G, inputs, (), {"num_heads": HEADS, "kv_num_heads": GROUPS, **more}, 17)
    feeds = {f"x{i}": a for i, a in inputs.items()}
    for one, other in zip(computed(model, feeds), in_onnxruntime(model, feeds), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", MANY)
def test_heads_with_their_own_keys_are_those_of_onnx_runtime(name, is_known) -> None:
    op, inputs, more = MANY[name]
    known = (7,) if op == M and is_known else ()
    model = node_model(op, inputs, known, {"num_heads": HEADS, **more}, 17)
    feeds = {f"x{i}": a for i, a in inputs.items() if i not in known}
    if "packed" in name:
        wanted = node_model(op, plain := unpacked(inputs), (), {"num_heads": HEADS}, 17)
        expected = in_onnxruntime(wanted, {f"x{i}": a for i, a in plain.items()})
    else:
        expected = in_onnxruntime(model, feeds)
    for i, (one, other) in enumerate(zip(computed(model, feeds), expected, strict=True)):
        assert one.shape == other.shape
        rows = int(inputs[7][0]) + 1 if op == M and i else None
        np.testing.assert_allclose(one[:, :, :rows] if i else one, other[:, :, :rows] if i else other, 1e-4, 1e-5)


def standard(past: int, rows: int, keys: int = 0, is_flat: bool = False) -> dict[int, Array]:
    """Return inputs of an Attention of the standard."""
    counts = (HEADS, GROUPS, GROUPS)
    shapes = [(BATCH, n, r, SIZE) for n, r in zip(counts, (rows, keys or rows, keys or rows), strict=True)]
    inputs = {i: real(*shape) for i, shape in enumerate(shapes)}
    if is_flat:
        inputs = {i: a.transpose(0, 2, 1, 3).reshape(BATCH, a.shape[2], -1) for i, a in inputs.items()}
    return inputs | ({i: real(BATCH, GROUPS, past, SIZE) for i in (4, 5)} if past else {})


FLAT = {"q_num_heads": HEADS, "kv_num_heads": GROUPS}
SOME = RNG.integers(0, 2, (3, 8)).astype(np.bool_)
SOME[1] = False
WINDOW = {"left_window_size": 2, "right_window_size": 1}
STANDARD: dict[str, tuple[dict[int, Array], dict[str, Any], int]] = {
    "past": (standard(5, 3), {}, 23),
    "past flat": (standard(5, 3, is_flat=True), {**FLAT, "is_causal": 1, "softcap": 2.0}, 23),
    "step": (standard(5, 1), {"is_causal": 1, "scale": 0.3}, 24),
    "mask": ({**standard(5, 3), 3: SOME}, {}, 23),
    "mask of scores": ({**standard(5, 3), 3: real(BATCH, 1, 3, 8)}, {"is_causal": 1}, 24),
    "short mask": ({**standard(5, 3), 3: SOME[:, :7]}, {"is_causal": 1}, 24),
    "valid": ({**standard(0, 3, 8), 6: ints(8, 5, dtype=np.int64)}, {"is_causal": 1}, 24),
    "valid flat": ({**standard(0, 3, 8, is_flat=True), 6: ints(6, 6, dtype=np.int64)}, {**FLAT, "is_causal": 1}, 24),
    "few valid": ({**standard(0, 3, 8), 6: ints(2, 1, dtype=np.int64)}, {"is_causal": 1}, 24),
    "valid mask": ({**standard(0, 3, 8), 3: SOME[:, :6], 6: ints(4, 5, dtype=np.int64)}, {}, 24),
    "all valid": ({**standard(0, 3, 8), 6: ints(8, 8, dtype=np.int64)}, {}, 24),
    "window": (standard(5, 3), WINDOW, 25),
    "valid window": ({**standard(0, 3, 8), 6: ints(8, 5, dtype=np.int64)}, WINDOW, 25),
    "causal window": (standard(5, 3), {**WINDOW, "is_causal": 1}, 25),
}


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", STANDARD)
def test_attention_is_that_of_the_standard(name, is_known) -> None:
    inputs, attributes, opset = STANDARD[name]
    known = (6,) if is_known and 6 in inputs else ()
    model = node_model("Attention", inputs, known, attributes, opset)
    feeds = {f"x{i}": a for i, a in inputs.items() if i not in known}
    for one, other in zip(computed(model, feeds), ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("op", "inputs"), [(G, grouped(5, 1)), (H, heads(5, 1)), ("Attention", standard(5, 1))])
def test_products_of_large_halves_are_finite(op, inputs) -> None:
    caches = sorted(i for i, a in inputs.items() if a.ndim == 4)[-2:]
    large = {i: np.full_like(a, 80, np.float16) if a.dtype == np.float32 else a for i, a in inputs.items()}
    large[2][:], large[caches[1]][:] = 6, 0
    attributes = {} if op == "Attention" else {"num_heads": HEADS, **({"kv_num_heads": GROUPS} if op == G else {})}
    model = node_model(op, large, (), attributes, 23 if op == "Attention" else 17)
    mixed = run(fission(load_model(model)), {f"x{i}": a for i, a in large.items()}, exact=False)["y0"]
    np.testing.assert_allclose(mixed, np.ones_like(mixed), rtol=1e-2)  # each of six equal keys has the weight 1/6


BAD = [
    (G, {**grouped(5, 3), 12: real(1)}, {}, UnsupportedError, "a scale of quantized keys, is given"),
    (G, turned(grouped(39, 3)), ROTARY, UnsupportedError, "its rotary tables have 40 places, and the rows reach 42"),
    (G, {**grouped(5, 3), 5: ints(20), 6: ints(21)}, {}, ModelError, "seqlens_k is 20 with 3 new rows, but the cache"),
    (M, {**masked(5), 8: ints(2), 9: np.zeros((BATCH, 2, 12), np.int32)}, SHARED, UnsupportedError, "several beams"),
    (H, {**heads(0, 4), 4: np.ones(3 * BATCH + 2, np.int32)}, {}, UnsupportedError, r"its mask has the shape \[8\]"),
]


@pytest.mark.parametrize(("op", "inputs", "attributes", "error", "text"), BAD)
def test_what_is_wrong_is_one_clear_error(op, inputs, attributes, error, text) -> None:
    known = (5, 6) if op == G else ()
    with pytest.raises(error, match=f"{op}.*{text}"):
        load_model(node_model(op, inputs, known, {"num_heads": HEADS, "kv_num_heads": GROUPS, **attributes}, 17))
