"""OpenMP's threads outlive a plan, and are missing in a forked child; both must not harm a later run."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import onnx
import pytest

from korch.host.engine import HostEngine
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.provider.onnxruntime import OnnxRuntimeProvider
from korch.runtime.artifact import archive_of
from tests.runtime import runtime_plans as plans
from tests.support.c_code import MEMBER, llvm_of
from tests.support.models import parsed

SIZE = 1 << 16
HANG_SECONDS = 60
"""After so long a child that hangs is ended by a signal, which is not how one that works ends."""


def region(symbol, sign):
    text = f"""{MEMBER}
int {symbol}_team(void *const *buffers, Member *own) {{
    const float *x = buffers[0];
    float *y = buffers[1];
    for (long i = own->me; i < {SIZE}; i += own->threads) y[i] = {sign};
    return 0;
}}
int {symbol}_run(void *state, void *const *buffers) {{ return korch_region(2, {symbol}_team, buffers); }}
"""
    return plans.Kernel(symbol, llvm_of(text))


def parallel_plan(operator=None):
    """y = |-x|, each a parallel region; before them an operator for ONNX Runtime."""
    builder, x = plans.new_graph(x=f"f32[{SIZE}]")
    if operator is not None:
        node = onnx.helper.make_node(operator, ["x0"], ["y0"])
        row = OpaqueAttributes(
            operator, "", 17, node.SerializeToString().hex(), (f"f32[{SIZE}]",), (f"f32[{SIZE}]",), 0
        )
        x = builder.add("opaque", [x], row)
    builder.output("y", builder.add("abs", [builder.add("neg", [x])]))
    graph = builder.freeze()
    steps = []
    if operator is not None:
        found = plans.step(graph, [plans.value_of(graph, "opaque")], plans.Kernel("", ""))
        provider = OnnxRuntimeProvider()
        (offer,) = provider.offer(found.candidate.group, plans.TARGET)
        kernel = provider.build(found.candidate.group, offer, plans.TARGET)
        steps.append(plans.step(graph, [plans.value_of(graph, "opaque")], kernel))
    steps.append(plans.step(graph, [plans.value_of(graph, "neg")], region("negate", "-x[i]")))
    absolute = region("absolute", "x[i] < 0 ? -x[i] : x[i]")
    steps.append(plans.step(graph, [plans.value_of(graph, "abs")], absolute))
    return plans.Plan(graph, tuple(steps), np.abs)


def exit_code_of_child(work: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        signal.alarm(HANG_SECONDS)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


LOAD_AND_DROP = """
import gc, sys, time
import numpy as np
import korch

for _ in range(20):
    executable = korch.load(sys.argv[1])
    executable(np.ones(executable.get_inputs()[0].shape, np.float32))
    del executable
    gc.collect()
    time.sleep(0.001)
"""


def test_threads_outlive_the_only_library_that_uses_openmp(make_artifact, tmp_path):
    path = tmp_path / "plan.korch"
    archive_of(make_artifact(parallel_plan())).write(path)
    # Threads that spin, in a process in which no other library has loaded OpenMP
    environment = {**os.environ, "OMP_WAIT_POLICY": "active"}
    done = subprocess.run([sys.executable, "-c", LOAD_AND_DROP, path], env=environment, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("operator", [None, "Elu"])
def test_a_forked_child_runs_what_its_parent_has_run(operator, make_executable):
    if operator is not None:
        pytest.importorskip("onnxruntime")
    executable = make_executable(parallel_plan(operator))
    x = np.linspace(-1, 1, SIZE, dtype=np.float32)
    (expected,) = executable(x)

    def work():
        for _ in range(2):
            np.testing.assert_array_equal(executable(x)[0], expected)

    assert exit_code_of_child(work) == 0
    work()
    # Another thread's run is not cut in two.
    is_done = threading.Event()
    runs = threading.Thread(target=lambda: [executable(x) for _ in iter(is_done.is_set, True)])
    runs.start()
    assert [exit_code_of_child(work) for _ in range(3)] == [0, 0, 0]
    is_done.set()
    runs.join()


def test_a_forked_child_runs_a_part_on_the_host():
    pytest.importorskip("onnxruntime")
    engine = HostEngine(parsed("(float[512,512] x) => (float[512,512] y) { y = MatMul(x, x) }"), 2)
    feeds = {"x": np.eye(512, dtype=np.float32)}
    engine.run(feeds)
    assert exit_code_of_child(lambda: np.testing.assert_array_equal(engine.run(feeds)["y"], feeds["x"])) == 0
