"""Kernels that TVM tunes; these tests need the extra `tvm`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import korch
from korch.candidate.candidate import Candidate, Group, Late, Refusal, make_group
from korch.errors import OptionError
from korch.limits import SearchLimits
from korch.measure.compiler import Builder
from korch.measure.llvm_process import llvm_identity
from korch.primitive.text import parse_graph
from korch.provider.provider import Kernel, Threading
from korch.system.deadline import Deadline
from korch.target import Target, detect_target
from korch.testing.kernels import check_kernel
from korch.testing.samples import random_arrays
from tests.support.facts import Facts

pytest.importorskip("tvm", reason="the extra `tvm` is not installed")

from korch.provider.tvm import process
from korch.provider.tvm.process import Tuner
from korch.provider.tvm.provider import TvmProvider

SOFTMAX = """graph(%0 "x": f32[6,37]) -> (%7 "y")
%1: f32[6,1] = reduce_max(%0) {axes=(1,)}
%2: f32[6,37] = broadcast(%1) {shape=(6, 37)}
%3: f32[6,37] = sub(%0, %2)
%4: f32[6,37] = exp(%3)
%5: f32[6,1] = reduce_sum(%4) {axes=(1,)}
%6: f32[6,37] = broadcast(%5) {shape=(6, 37)}
%7: f32[6,37] = div(%4, %6)
"""

GROUPS = {
    "softmax": SOFTMAX,
    "functions": """graph(%0 "x": f32[5,7]) -> (%5 "y")
%1: f32[5,7] = tanh(%0)
%2: f32[5,7] = erf(%1)
%3: f32[5,7] = sigmoid(%0)
%4: f32[5,7] = max(%2, %3)
%5: f32[5,7] = sub(%4, %3)
""",
    "moves": """graph(%0 "x": f32[2,3,8]) -> (%5 "y")
%1: f32[2,8,3] = transpose(%0) {perm=(0, 2, 1)}
%2: f32[16,3] = reshape(%1) {shape=(16, 3)}
%3: f32[19,5] = pad(%2) {before=(1, 2), after=(2, 0), mode='reflect', value=0.0}
%4: f32[6,5] = slice(%3) {start=(17, 0), size=(6, 5), step=(-3, 1)}
%5: f32[12,5] = concat(%4, %4) {axis=0}
""",
    "integers and masks": """graph(%0 "x": f32[4,9], %1 "n": i64[4,9]) -> (%5 "y", %6 "any")
%2: bool[4,9] = isnan(%0)
%3: bool[4,9] = not(%2)
%4: f32[4,9] = cast(%1) {to='f32'}
%5: f32[4,9] = where(%3, %0, %4)
%6: bool[1,9] = reduce_max(%2) {axes=(0,)}
""",
    "windows": """graph(%0 "x": f32[1,3,9,8]) -> (%2 "y")
%1: f32[1,3,5,4] = pool_max(%0) {kernel=(3, 3), strides=(2, 2), pads_begin=(1, 1), pads_end=(1, 0), dilations=(1, 1)}
%2: f32[1,3,5,4] = sqrt(%1)
""",
    "product": """graph(%0 "a": f32[2,9,17], %1 "b": f32[1,17,12]) -> (%3 "y")
%2: f32[2,9,12] = matmul(%0, %1)
%3: f32[2,9,12] = neg(%2)
""",
    "one element": """graph(%0 "x": f32[]) -> (%1 "y")
%1: f32[] = reciprocal(%0)
""",
}

REFUSED = {
    'graph(%0 "x": f32[0,3]) -> (%1 "y")\n%1: f32[0,3] = neg(%0)\n': "a value of 0 elements",
    'graph(%0 "x": f16[3]) -> (%1 "y")\n%1: f16[3] = neg(%0)\n': "elements of type f16",
    'graph(%0 "x": f32[3]) -> (%1 "y")\n%1: f32[2] = take(%0) {axis=0, indices=(2, 0)}\n': "takes elements by a table",
    'graph(%0 "a": f32[512,512], %1 "b": f32[512,512]) -> (%2 "y")\n%2: f32[512,512] = matmul(%0, %1)\n': "large",
}


@pytest.fixture(scope="module")
def target() -> Target:
    return detect_target(threads=2, compiler=llvm_identity())


def group_of(text: str) -> Group:
    graph = parse_graph(text)
    return make_group(graph, range(len(graph.primitives)), [value for _, value in graph.outputs])


def of_sources(candidates: Sequence[Candidate], kernels: dict[str, Kernel], end: Deadline) -> list[int | str | None]:
    """Take the length of a source for its time: a kernel is not run."""
    return [len(kernels[candidate.key].source) for candidate in candidates]


@pytest.fixture(scope="module")
def tuner() -> Iterator[Tuner]:
    """The process that runs TVM, which all tests share."""
    found = Tuner()
    yield found
    found.close()


@pytest.mark.long
@pytest.mark.parametrize("name", GROUPS)
def test_every_schedule_computes_what_the_reference_does(name: str, target: Target, tuner: Tuner) -> None:
    group, builder, rng = group_of(GROUPS[name]), Builder(target.isa), np.random.default_rng(0)
    checked: list[Kernel] = []

    def timed(candidates: Sequence[Candidate], kernels: dict[str, Kernel], end: Deadline) -> list[int | str | None]:
        for specials in (False, name != "product"):  # sums of products overflow in any order
            arrays = random_arrays(rng, group.input_types, specials)
            for kernel in kernels.values():
                check_kernel(kernel, group, candidates[0].offer, arrays, builder)
        checked.extend(kernels.values())
        return of_sources(candidates, kernels, end)

    provider = TvmProvider(Facts(), timed, seconds=400.0, tuner=tuner)
    (offer,) = provider.offer(group, target)
    built = provider.build(group, offer, target)
    assert isinstance(built, Kernel), built
    assert built.source == min((kernel.source for kernel in checked), key=len)
    assert built.threading in (Threading.TEAM, Threading.CALLER)


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_tuned_is_refused(text: str, target: Target) -> None:
    found = TvmProvider(Facts(), of_sources, seconds=1.0).offer(group_of(text), target)
    assert isinstance(found, Refusal)
    assert REFUSED[text] in found.reason


def test_a_result_is_kept_and_used_again(target: Target, tuner: Tuner) -> None:
    facts, group = Facts(), group_of(GROUPS["one element"])
    first = TvmProvider(facts, of_sources, seconds=100.0, tuner=tuner)
    (offer,) = first.offer(group, target)
    built = first.build(group, offer, target)
    again = TvmProvider(facts, of_sources, seconds=0.0)
    assert again.build(group, offer, target) == built
    assert again.tuned == 0 and first.tuned == 1
    (fact,) = facts.facts.values()
    assert json.loads(json.loads(fact)["proposal"]["trace"])[0], "TVM's record of the schedule"
    assert "MetaSchedule" in again.describe(group, offer)[0]


def test_without_time_nothing_is_tuned_and_nothing_is_kept(target: Target) -> None:
    facts, group, over = Facts(), group_of(SOFTMAX), Deadline.after(0.0, time.monotonic())
    for provider in (TvmProvider(facts, of_sources, 0.0), TvmProvider(facts, of_sources, 100.0, over)):
        assert isinstance(provider.build(group, provider.offer(group, target)[0], target), Late)
        assert provider.tuner._process is None and not facts.facts


@pytest.mark.parametrize(
    ("code", "seconds", "result", "message"),
    [
        ("import time; time.sleep(600)", 0.5, Late, "no time is left"),
        ("import os; print(); os.abort()", 60.0, Refusal, "TVM: TVM aborted"),
        ('print(); input(); print(\'{"kernels": [], "reason": "why"}\')', 60.0, Refusal, "TVM: why"),
    ],
)
def test_a_process_that_hangs_or_aborts_costs_only_its_group(
    code: str, seconds: float, result: type, message: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "WORKER", [sys.executable, "-c", code])
    monkeypatch.setattr("korch.provider.tvm.provider.LEAST_SECONDS", 0.1)
    provider, group = TvmProvider(Facts(), of_sources, seconds), group_of(SOFTMAX)
    found = provider.build(group, provider.offer(group, target)[0], target)
    assert type(found) is result and message in found.reason
    provider.close()


MODEL = """<ir_version: 8, opset_import: ["": 18]>
g (float[6, 40] x, float[40] b) => (float[6, 40] y) { a = Add(x, b)  s = Softmax(a)  y = Tanh(s) }
"""

WITHOUT_TVM = """
import sys
sys.modules["tvm"] = None
import numpy as np, korch
x, b = (np.load(path) for path in sys.argv[2:4])
np.save(sys.argv[4], korch.load(sys.argv[1])(x, b)[0])
"""


@pytest.mark.long
def test_a_model_runs_on_tuned_kernels_without_tvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("korch.backend.load_providers", lambda *_: ())  # so that only TVM has kernels
    model = onnx.parser.parse_model(MODEL)
    onnx.save(model, tmp_path / "model.onnx")
    ledger, limits = tmp_path / "ledger", SearchLimits(tvm_seconds=60.0)

    def optimized(cache: str, **options: Any) -> Any:
        path = tmp_path / "model.onnx"
        return korch.optimize(
            path, threads=2, search=limits, cache_folder=tmp_path / cache, progress=False, schedule="joins", **options
        )

    first = optimized("cache", ledger=ledger)
    assert {step.provider for step in first.plan.steps} == {"tvm"}
    assert re.match(r"tvm: [1-9]\d* groups tuned", first.report.provider_reports[0])
    with monkeypatch.context() as patch:
        patch.setattr(Tuner, "begin", lambda *_: pytest.fail("a group is tuned again"))
        assert optimized("cache").plan.steps
        replayed = optimized("another cache", replay=ledger)
    assert [step.symbol for step in replayed.plan.steps] == [step.symbol for step in first.plan.steps]
    rng, paths = np.random.default_rng(0), [tmp_path / name for name in ("model.korch", "x.npy", "b.npy", "y.npy")]
    feeds = {"x": rng.normal(size=(6, 40)).astype(np.float32), "b": rng.normal(size=40).astype(np.float32)}
    first.save(paths[0])
    for path, array in zip(paths[1:], feeds.values(), strict=False):
        np.save(path, array)
    subprocess.run([sys.executable, "-c", WITHOUT_TVM, *map(str, paths)], check=True, cwd=tmp_path)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(np.load(paths[3]), expected, rtol=1e-4, atol=1e-6)


def test_a_search_that_asks_for_tvm_and_cannot_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="option tvm_seconds: TVM tunes kernels for CPUs by timing them"):
        korch.optimize(
            onnx.parser.parse_model(MODEL), measure=False, search=SearchLimits(tvm_seconds=1.0), cache_folder=tmp_path
        )
