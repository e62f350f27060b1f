"""Operators without a PyTorch call: the host runs them between parts of the model that run on the device.

In these tests the CPU runs the parts for the device.
"""

from dataclasses import replace

import numpy as np
import pytest

import korch
from korch.cuda.runtime.executable import CudaExecutable
from korch.errors import UnprovidedError, UnsupportedError
from korch.fission import fission
from korch.host import executable as hosted
from korch.host import optimize as host_optimize
from korch.host.executable import HostPart, NativePart
from korch.limits import SearchLimits
from korch.options import Options
from korch.primitive.lowering import lower_products
from korch.primitive.torch_calls.recurrences import MOST_STEPS
from korch.runtime.report import Report
from tests.cuda.test_whole_plans import build_program
from tests.support.cuda_issue import issue_on_cpu
from tests.support.cuda_plan import program_of_graph
from tests.support.models import parsed


class IssuedOnCpu(CudaExecutable):
    """An executable without a device."""

    def __init__(self, program):
        self._program, self.report = program, Report(status="a test")

    def compute(self, arrays):
        torch = pytest.importorskip("torch")
        assert all(isinstance(array, np.ndarray) for array in arrays)
        found = issue_on_cpu(self._program, [torch.from_numpy(array.copy()) for array in arrays])
        return tuple(tensor.numpy() for tensor in found)


@pytest.fixture
def on_cpu(monkeypatch):
    """Let segments be planned for a device by bounds, and issued on the CPU."""

    def plan(segment, options, shapes=None, progress=None, deadline=None):
        found = replace(
            options,
            target="cuda:sm_90",
            measure=False,
            search=SearchLimits(partition="off"),
            ablation=replace(options.ablation, baselines=False),
        )
        return IssuedOnCpu(program_of_graph(lower_products(fission(segment)), found, (), build_program))

    monkeypatch.setattr(host_optimize, "require_torch", lambda: None)
    monkeypatch.setattr(host_optimize, "optimize_model", plan)
    monkeypatch.setattr(hosted, "CudaExecutable", IssuedOnCpu)


def model():
    """Elementwise, a pooling that PyTorch has in another form, elementwise, a search, a gather."""
    text = """(float[1,3,5,5] x) => (float[1,3,4,1,33] y, float[1,3,4,4] c) {
        [before] a = Tanh(x)
        [pool] b = LpPool<kernel_shape = [2, 2], p = 3>(a)
        [between] c = Mul(b, b)
        [search] best, d = TopK(c, k)
        ["look up"] y = Gather(t, d)
    }"""
    table = np.random.default_rng(1).standard_normal((4, 33)).astype(np.float32)
    return parsed(text, 20, t=table, k=np.array([1]))


def test_the_host_runs_what_pytorch_does_not_have(on_cpu, monkeypatch, tmp_path):
    options = Options(target="cuda", cache_folder=tmp_path)
    found = host_optimize.optimize_with_host(model().SerializeToString(), options)
    assert [type(part) for part in found.parts] == [NativePart, HostPart, NativePart]
    (entry,) = found.report.host
    assert "pool" in entry.node and "LpPool" in entry.reason
    calls = [step.call for step in found.parts[2].executable._program.steps if step.call]
    assert len(calls) >= 2  # a search and a gather are PyTorch's
    x = np.random.default_rng(0).standard_normal((1, 3, 5, 5)).astype(np.float32)
    session = pytest.importorskip("onnxruntime").InferenceSession(
        model().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    expected = session.run(None, {"x": x})
    found.save(tmp_path / "h.korch")

    for executable in (found, korch.load(tmp_path / "h.korch")):
        for actual, wanted in zip(executable(x), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


def test_without_a_device_nothing_is_left_to_the_host(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(UnsupportedError, match="CUDA"):
        korch.optimize(model().SerializeToString(), target="cuda", cache_folder=tmp_path)


def recurrence(steps):
    text = f"""(float[{steps},2,4] x) => (float[{steps},1,2,3] y) {{
        [before] a = Tanh(x)
        [loop] y = GRU<hidden_size = 3>(a, w, r)
    }}"""
    rng = np.random.default_rng(1)
    weights = {n: rng.standard_normal((1, 9, width)).astype(np.float32) for n, width in (("w", 4), ("r", 3))}
    return parsed(text, 20, **weights).SerializeToString()


def test_the_host_runs_recurrences_that_no_provider_of_the_device_runs(tmp_path):
    for target, steps, nodes in (("cuda", MOST_STEPS + 1, ["loop"]), ("cuda", 4, []), ("cpu", MOST_STEPS + 1, [])):
        host = {}
        options = Options(target=target, cache_folder=tmp_path)
        host_optimize.split_for_host(recurrence(steps), options, None, host)
        assert list(host) == nodes


def test_the_host_runs_a_recurrence_that_stays_whole_and_has_no_kernel(on_cpu, monkeypatch, tmp_path):
    plan = host_optimize.optimize_model

    def refuse(segment, *rest):
        if any(operator.op_type == "GRU" for operator in segment.operators):
            raise UnprovidedError("no kernel")
        return plan(segment, *rest)

    monkeypatch.setattr(host_optimize, "optimize_model", refuse)
    found = host_optimize.optimize_with_host(recurrence(4), Options(target="cuda", cache_folder=tmp_path))
    assert [type(part) for part in found.parts] == [NativePart, HostPart]
