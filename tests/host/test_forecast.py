"""`korch check` says what an optimization does, and refuses what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import korch
from korch.cli import main
from korch.errors import KorchError, UnsupportedError
from korch.host.executable import HostedExecutable
from korch.host.forecast import Forecast, forecasts
from korch.measure.compiler import target_of
from korch.options import Options
from korch.provider.provider import load_providers
from korch.runtime.executable import Executable
from korch.system.extras import install_command
from tests.runtime.cached_models import Form
from tests.support.models import parsed, saved, sum_and_place

Capture = pytest.CaptureFixture[str]

FLOATS = np.ones((8, 8), np.float32)
NATIVE = "(float[4,8] x) => (float[4,8] y) { h = MatMul(x, w) r = Relu(h) y = Softmax(r) }"
OPAQUE = "(float[4,3,3] x) => (float[4] y) { r = Relu(x) y = Det(r) }"
DATA = "(float[4,4] x) => (int64[2,n] y) { h = MatMul(x, x) r = Relu(h) y = NonZero(r) }"


def one(model: onnx.ModelProto, **binding: Any) -> Forecast:
    [found] = forecasts(model, Options(threads=1), [{n: (size,) for n, size in binding.items()}])
    return found


def hosted_loop() -> onnx.ModelProto:
    """Return a model with a product, and a loop whose number of iterations is an input."""
    text = """(float[4,4] x, int64 trips) => (float[2,n] y) {
        h = MatMul(x, x)
        places = NonZero(h)
        floats = Cast<to = 1>(places)
        [repeat] y = Loop<body = body (int64 i, bool go, float[] before) => (bool goes, float[] after) {
            after = Add(before, before)
            goes = Identity(go)
        }>(trips, , floats)
    }"""
    return parsed(text)


def branches() -> onnx.ModelProto:
    """Return a model with a product, and a branch that reads a value from outside and whose condition is an input."""
    text = """(float[4,4] x, bool go) => (float[4,4] y) {
        h = MatMul(x, x)
        [choose] y = If<
            then_branch = a () => (float[4,4] r) { r = Relu(h) },
            else_branch = b () => (float[4,4] r) { r = Neg(h) }
        >(go)
    }"""
    return parsed(text)


def test_a_branch_that_an_input_chooses() -> None:
    found = one(branches())
    assert [(item.node, item.reason) for item in found.host] == [("If choose", "its subgraph reads 'h' from outside")]
    assert (found.native, len(found.least)) == (1, 1)
    assert "Export the model without control flow" in found.advice[0]


def test_a_native_model(cache_folder: Path) -> None:
    model = parsed(NATIVE, w=FLOATS * np.arange(8, dtype=np.float32))
    found = one(model)
    assert (found.native, found.library, found.host) == (3, [], [])
    assert (found.weights_bytes, found.values_bytes) == (256, 384)  # a subtraction has 3 arrays of 4 x 8 floats
    assert found.budget_s >= found.least[0].total_s > 0
    assert [line for line in found.advice if "--error 1e-2" in line]
    exe = korch.optimize(model, threads=1, budget=1, cache_folder=cache_folder)
    assert isinstance(exe, Executable)


def test_equal_elements_are_no_weights() -> None:
    assert one(parsed(NATIVE, w=FLOATS)).weights_bytes == 0


def test_an_operator_of_a_library(cache_folder: Path) -> None:
    pytest.importorskip("onnxruntime")
    found = one(parsed(OPAQUE))
    assert (found.native, found.host) == (1, [])
    [item] = found.library
    assert (item.operator, item.node, item.engine, item.reason) == ("Det", "Det y", "onnxruntime", "no rule")
    assert "library: Det y: onnxruntime (no rule)" in found.to_text().splitlines()
    exe = korch.optimize(parsed(OPAQUE), threads=1, budget=1, cache_folder=cache_folder)
    assert isinstance(exe, Executable)
    assert "onnxruntime" in {step.provider for step in exe.plan.steps}


def test_without_the_library_the_host_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tuple(p for p in load_providers() if not getattr(p, "runs_opaque", False))
    monkeypatch.setattr("korch.backend.load_providers", lambda *_: own)
    monkeypatch.setattr("korch.host.engine.open_session", lambda *_: (None, "it is not installed"))
    found = one(parsed(OPAQUE))
    assert (found.native, found.library) == (1, [])
    [item] = found.host
    assert (item.node, item.engine) == ("Det y", "onnx.reference")
    assert install_command("onnxruntime") in item.reason
    assert len([line for line in found.advice if install_command("onnxruntime") in line]) == 1


def test_an_operator_that_is_kept_whole_may_have_a_native_kernel() -> None:
    model = parsed("(float[8,8] x) => (float[8,2] y, int64[8,2] z) { y, z = TopK<axis=1>(x, k) }", k=np.array([2]))
    found = one(model)
    assert (found.native, found.library, found.host) == (1, [], [])


@pytest.mark.parametrize(
    ("model", "nodes"),
    [(parsed(DATA), ["NonZero y"]), (hosted_loop(), ["NonZero places", "Cast floats", "Loop repeat"])],
)
def test_a_part_on_the_host(model: onnx.ModelProto, nodes: list[str], cache_folder: Path) -> None:
    found = one(model)
    assert [item.node for item in found.host] == nodes
    assert found.native == 2 - (len(nodes) == 3) and len(found.least) == 1
    assert (
        "(NonZero): the shape of its output" in found.advice[0] and "Cut the model before this node" in found.advice[0]
    )
    assert not [line for line in found.advice if "--error" in line]  # such models are refused with --error
    inputs = {"x": np.eye(4, dtype=np.float32), "trips": np.array(2)}
    given = {item.name: inputs[item.name] for item in model.graph.input}
    exe = korch.optimize(model, threads=1, budget=2, cache_folder=cache_folder, inputs=given)
    assert isinstance(exe, HostedExecutable)
    assert [(n.node, n.reason) for n in exe.report.host] == [(item.node, item.reason) for item in found.host]


def test_a_free_dimension() -> None:
    found = one(sum_and_place())
    assert found.advice[-1] == "sizes that are not given are assumed; to change them: --shape rows=1..128"
    assert found.values_bytes == 3 * 128 * 4 * 4
    assert not [line for line in found.advice if "--error" in line]
    fixed = one(sum_and_place(), rows=2)
    assert (fixed.values_bytes, fixed.advice) == (3 * 2 * 4 * 4, [])
    assert one(sum_and_place(), rows=range(1, 9)).values_bytes == 3 * 8 * 4 * 4


@pytest.mark.parametrize("sizes", [{}, {"past": range(40), "rows": range(1, 9)}])
def test_a_model_with_states(sizes: dict[str, range]) -> None:
    found = one(Form("MultiHeadAttention", 17).build(), **sizes)
    assert (len(found.least), found.host) == (3, [])
    text = "the model has states; sizes that are not given are assumed: --shape past=0..1023 --shape rows=1..128"
    assert found.advice == ([] if sizes else [text])


def test_a_range_that_the_host_does_not_take_is_refused_or_replaced() -> None:
    model = parsed("(float[n,4] x) => (int64[2,m] y) { r = Relu(x) y = NonZero(r) }")
    assert one(model).advice[1].startswith("the model is optimized for one size of each dimension: ")
    with pytest.raises(UnsupportedError, match="NonZero"):
        one(model, n=range(1, 9))


def test_bindings_with_a_part_on_the_host_are_refused(cache_folder: Path) -> None:
    model = parsed("(float[n,4] x) => (int64[2,m] y) { r = Relu(x) y = NonZero(r) }")
    bindings = [{"n": (1,)}, {"n": (2,)}]
    with pytest.raises(UnsupportedError) as info:
        forecasts(model, Options(threads=1), bindings)
    with pytest.raises(UnsupportedError) as expected:
        korch.optimize(model, threads=1, budget=1, shapes=bindings, cache_folder=cache_folder)
    assert str(info.value) == str(expected.value)


@pytest.mark.parametrize(
    "text",
    ["(float[4] x) => (float[4] y) { y = Unheard(x) }", "(float[4] x, float[3] z) => (float[4] y) { y = Add(x, z) }"],
)
def test_a_refused_model_has_the_message_of_an_optimization(text: str, cache_folder: Path) -> None:
    with pytest.raises(KorchError) as info:
        one(parsed(text))
    with pytest.raises(KorchError) as expected:
        korch.optimize(parsed(text), threads=1, budget=1, cache_folder=cache_folder)
    assert (type(info.value), str(info.value)) == (type(expected.value), str(expected.value))


BYTES = "(uint8[4,8] x) => (int32[4,8] y) { y = MatMulInteger(x, w) }"
HALVES = "(float16[4,8] x) => (float16[4,8] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize(
    ("text", "dtype", "isa", "note"),
    [
        (BYTES, np.uint8, "avx2", "its float model may be faster"),
        (BYTES, np.uint8, "avx512_vnni", ""),
        (HALVES, np.float16, "avx512_vnni", "they are computed in float32"),
        (HALVES, np.float16, "amx", ""),
    ],
)
def test_what_a_cpu_lacks(text: str, dtype: Any, isa: str, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(target_of(Options(threads=1)), isa=isa)
    monkeypatch.setattr("korch.host.forecast.target_of", lambda _: own)
    found = one(parsed(text, w=FLOATS.astype(dtype)))
    assert [line.endswith(note) for line in found.advice] == [True] * bool(note)


def test_the_command(tmp_path: Path, cache_folder: Path, capsys: Capture) -> None:
    path = saved(parsed(DATA), tmp_path)
    command = ["check", str(path), "--threads", "1", "--cache-folder", str(cache_folder)]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["native"], record["host"][0]["node"], record["threads"]) == (2, "NonZero y", 1)
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}: 2 native, 0 of a library, 1 on the host (")
    assert [line.split(":")[0] for line in lines[1:]] == ["host", "least budget", "memory", "note"]
    several = saved(sum_and_place(), tmp_path)
    assert main(["check", str(several), "--shape", "rows=2,3", "--json"]) == 0
    assert [b["values_bytes"] for b in json.loads(capsys.readouterr().out)["bindings"]] == [96, 144]
    path.write_bytes(path.read_bytes()[:60])
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [
        f"korch: {path}: this is no ONNX model, or it was cut short. Export or download it again"
    ]
