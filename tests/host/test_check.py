"""What the host runs is compared with other references, and moves to the engine that is right."""

import io
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import korch
from korch.errors import ProviderError, UnsupportedError
from korch.host import check
from korch.host.check import check_host, random_value
from korch.host.engine import HostEngine
from korch.host.executable import HostedExecutable
from korch.primitive.agreed import NUMPY, OWN, REFERENCE, RUNTIME
from korch.primitive.dispute import noted_disputes
from korch.primitive.op import Array
from korch.report.explain import describe
from tests.support.models import feeds_of, one_operator, parsed

HALF = np.random.default_rng(0).normal(size=(1, 3, 2)).astype(np.float32)
INVERSE = {"opset": 20, "inverse": 1, "onesided": 1}
LENGTH = {1: np.array(3), 2: np.array(1)}


def inverse_transform() -> onnx.ModelProto:
    """Return a model that ONNX Runtime computes otherwise than its definition."""
    return one_operator("DFT", [HALF], constants=LENGTH, **INVERSE)


def test_a_wrong_engine_is_replaced() -> None:
    model, feeds = inverse_transform(), feeds_of([HALF])
    engine = HostEngine(model, 1)
    assert engine.name == RUNTIME
    right = np.fft.irfft(HALF[..., 0] + 1j * HALF[..., 1], 3)
    assert np.abs(engine.run(feeds)["y0"][..., 0] - right).max() > 0.1  # a new version may be right: choose another
    with noted_disputes() as disputes:
        engine, results, texts = check_host(engine, model, feeds)
    assert (engine.name, engine.avoided, texts) == (REFERENCE, "its results are wrong", [f"checked by {OWN}"])
    assert np.abs(results["y0"][..., 0] - right).max() < 1e-5
    assert [(d.followed, d.others) for d in disputes.values()] == [((REFERENCE, OWN), (RUNTIME,))]


def test_inputs_that_no_engine_takes_do_not_replace_it() -> None:
    x = np.arange(3, dtype=np.float32)
    engine = HostEngine(one_operator("Gather", [x, np.array([1])]), 1)
    with pytest.raises(ProviderError, match="the host can't run it"):
        engine.run(feeds_of([x, np.array([7])]))
    assert engine.name == RUNTIME
    assert engine.run(feeds_of([x, np.array([2])]))["y0"] == [2]


def test_a_right_engine_stays() -> None:
    x = np.array([[2, 1, 1], [3, 2, 0]], np.float32)
    model = one_operator("Unique", [x], opset=11, outputs=4, sorted=0)
    engine, results, texts = check_host(HostEngine(model, 1), model, feeds_of([x]))
    assert (engine.name, engine.avoided, texts) == (RUNTIME, "", [f"checked by {NUMPY}"])
    assert results["y0"].tolist() == [2, 1, 3, 0]


def test_no_engine_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((2, 2), np.float32)
    model = one_operator("NonZero", [x])
    wrong = np.zeros((2, 3), np.int64)
    monkeypatch.setattr(check, "opinions_of", lambda *_: {"a": lambda _: [wrong], "b": lambda _: [wrong]})
    with pytest.raises(UnsupportedError, match=r"NonZero.*neither ONNX Runtime nor onnx\.reference computes what two"):
        check_host(HostEngine(model, 1), model, feeds_of([x]))


def test_nodes_of_a_segment_are_checked_one_by_one() -> None:
    text = """(float[2,2] x) => (float[2,2] y, int64[] z) {
        [noise] r = RandomNormalLike(x)
        [add] y = Add(x, r)
        [find] z = NonZero(x)
    }"""
    model = parsed(text)
    _, _, texts = check_host(HostEngine(model, 1), model, {"x": np.eye(2, dtype=np.float32)})
    assert texts == [
        "not checked: its output is random",
        "not checked: its inputs are random or unknown",
        f"checked by {REFERENCE}",
    ]


def test_a_result_on_which_no_two_agree_is_no_standard() -> None:
    x = np.ones((4, 4), np.float32)
    model = one_operator("Dropout", [x], constants={1: np.array(0.5, np.float32), 2: np.array(True)}, opset=13)
    with noted_disputes() as disputes:
        engine, _, texts = check_host(HostEngine(model, 1), model, feeds_of([x]))
    assert (engine.name, texts) == (RUNTIME, ["not checked: no other reference computes the same on these inputs"])
    assert [d.is_decided for d in disputes.values()] == [False]


def test_a_reference_without_time() -> None:
    x = np.eye(2, dtype=np.float32)
    model = one_operator("NonZero", [x])
    _, _, texts = check_host(HostEngine(model, 1), model, feeds_of([x]), limit_s=0)
    assert texts == ["not checked: no other reference computes the same on these inputs within 0 s"]


@pytest.mark.parametrize(
    ("proto", "found"),
    [
        (helper.make_tensor_type_proto(onnx.TensorProto.STRING, [3]), ["ab", "c d", "ab"]),
        (helper.make_tensor_type_proto(onnx.TensorProto.STRING, []), "ab"),
    ],
)
def test_random_strings(proto: onnx.TypeProto, found: object) -> None:
    assert random_value("x", proto, 0).tolist() == found


def test_random_sequences_and_unknown_types() -> None:
    tensor = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2, "n"])
    first, second = random_value("x", helper.make_sequence_type_proto(tensor), 0)
    assert first.shape == second.shape == (2, 2) and not np.array_equal(first, second)
    with pytest.raises(ProviderError, match="no random values for the input 'x'"):
        random_value("x", None, 0)


def optimized(model: onnx.ModelProto, cache_folder: Any, **options: Any) -> Any:
    """Return an executable made without measuring."""
    return korch.optimize(model, measure=False, cache_folder=cache_folder, **options)


def nonzero(x: Array) -> onnx.ModelProto:
    """Return a model whose output shape depends on data."""
    return one_operator("NonZero", [x])


@pytest.mark.parametrize("given", [None, {"x0": np.eye(3, dtype=np.float32)}])
def test_the_report_says_how_the_host_was_checked(given: dict[str, Array] | None, cache_folder: Any) -> None:
    report = optimized(nonzero(np.eye(3, dtype=np.float32)), cache_folder, inputs=given).report
    (node,) = report.host
    inputs = "the given inputs" if given else "random inputs"
    assert (node.node, node.engine, node.checked) == ("NonZero it", RUNTIME, f"checked by {REFERENCE} on {inputs}")
    assert f"({node.checked})" in describe("m", report)


def test_results_are_no_memory_of_the_caller_or_of_the_executable(cache_folder: Any) -> None:
    nodes = "z = NonZero(x) y = Identity(x) w = Constant<value = float[2] {3, 4}>()"
    executable = optimized(
        parsed(f"(float[2,2] x) => (int64[] z, float[2,2] y, float[2] w) {{ {nodes} }}"), cache_folder
    )
    x = np.eye(2, dtype=np.float32)
    for _ in range(2):
        _, y, w = executable(x)
        np.testing.assert_array_equal(y, np.eye(2))
        np.testing.assert_array_equal(w, [3, 4])
        y[...] = w[...] = 0


def test_an_engine_that_fails_on_random_inputs_is_not_checked(cache_folder: Any) -> None:
    model = parsed("(float[2,2] x, int64[1] s) => (int64[] y) { z = NonZero(x) [it] y = Reshape(z, s) }")
    for node in optimized(model, cache_folder).report.host:
        assert node.engine == RUNTIME
        assert node.checked.startswith("not checked: on random inputs the host can't run it: cannot reshape")
        assert node.checked.endswith("; give inputs with --inputs")
    given = {"x": np.eye(2, dtype=np.float32), "s": np.array([4])}
    assert all("the given inputs" in n.checked for n in optimized(model, cache_folder, inputs=given).report.host)
    with pytest.raises(ProviderError):
        optimized(model, cache_folder, inputs=given | {"s": np.array([7])})


def test_the_choice_of_the_engine_is_saved(cache_folder: Any) -> None:
    executable = optimized(nonzero(np.eye(2, dtype=np.float32)), cache_folder)
    (part,) = executable.parts
    object.__setattr__(part, "engine", HostEngine(part.model, 1, "its results are wrong"))
    (loaded,) = HostedExecutable.load(io.BytesIO(executable.to_bytes())).parts
    assert (loaded.engine.name, loaded.engine.avoided) == (REFERENCE, "its results are wrong")
