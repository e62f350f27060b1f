import json
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import build
from korch.errors import MeasureError, OptionError, UnsupportedError
from korch.inputs import random_inputs
from korch.report.compare import Comparison, Row, RunnerSpec, Settings, Speedup, compare
from korch.report.peers import process

INPUTS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.fixture(autouse=True)
def _fake_peers(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture(autouse=True)
def children(monkeypatch):
    """Record each child process; after each test, none may be left."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(process.subprocess, "Popen", Recorded)
    yield started
    assert all(child.returncode is not None for child in started)


def _fake(name):
    return RunnerSpec(f"fake_peers:{name}", Path("none.onnx"), label=name.lower())


def _compare(*names, **options):
    asked = {name: options.pop(name) for name in ("reference", "progress") if name in options}
    settings = Settings(**({"threads": 1, "rounds": 2, "warm_up": 0, "run_timeout_s": 30} | options))
    return compare([_fake(name) for name in names], INPUTS, settings, **asked)


def test_real_peers_agree_and_the_speedup_is_the_median_of_paired_ratios(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(build("tiny_candy").SerializeToString())
    specs = [RunnerSpec("onnxruntime", path), RunnerSpec("openvino", path)]
    said = []
    begun_s = time.monotonic()
    result = compare(specs, random_inputs(path), Settings(1, 3, subject="openvino"), progress=said.append)
    assert [row.name for row in result.rows] == ["onnxruntime", "openvino"]
    first, second = result.rows
    assert 0 < first.ready_s < time.monotonic() - begun_s
    assert first.max_error == 0
    assert 0 < second.max_error < 1e-4
    assert all(len(row.times_ns) == 3 and min(row.times_ns) > 0 for row in result.rows)
    assert first.p10_ms <= first.median_ms <= first.p90_ms
    assert first.median_ms == pytest.approx(np.median(first.times_ns) / 1e6)
    ratios = np.array(first.times_ns) / np.array(second.times_ns)
    assert result.speedup.over == "onnxruntime"
    assert result.speedup_over_best == pytest.approx(np.median(ratios))
    assert said[0] == "preparing onnxruntime"
    assert said[-1] == "round 3 of 3"


def test_wrong_outputs_show_in_the_error_column():
    result = _compare("DOUBLE", "WRONG", "OTHER_SHAPE", subject="wrong")
    assert [row.max_error for row in result.rows] == [0.0, 0.05, float("inf")]
    rows = json.loads(json.dumps(result.to_json(), allow_nan=False))["rows"]
    assert [row["max_error"] for row in rows] == [0.0, 0.05, None]


def test_given_reference_outputs_take_the_place_of_the_first_runners():
    result = _compare("WRONG", "DOUBLE", reference=[2 * INPUTS["x"]])
    assert [row.max_error for row in result.rows] == [0.05, 0.0]


def test_without_the_subject_there_is_no_speedup():
    assert _compare("DOUBLE", "WRONG").speedup_over_best is None
    assert _compare("DOUBLE", subject="double").speedup_over_best is None


def test_the_engine_gets_path_names_and_threads():
    result = _compare("ARGUMENTS", threads=3, reference=[np.array([3, 3, 1, len("none.onnx")])])
    assert result.rows[0].max_error == 0


def test_what_an_engine_prints_does_not_disturb():
    assert _compare("PRINT").rows[0].max_error == 0


def test_an_engine_that_keeps_spinning_is_named():
    # Other engines may be found busy, too, on a busy machine.
    assert "spin" in _compare("SPIN", "DOUBLE", rounds=2).unsettled


def test_a_crash_names_the_engine_the_signal_and_its_last_words():
    with pytest.raises(MeasureError) as caught:
        _compare("DOUBLE", "SEGFAULT")
    assert str(caught.value).startswith("peer segfault: its process was killed by SIGSEGV while it was asked to 'run'")


def test_an_exit_names_the_code():
    with pytest.raises(MeasureError) as caught:
        _compare("EXIT")
    assert str(caught.value) == ("peer exit: its process ended with exit code 3 while it was asked to 'run'")


def test_a_hang_is_ended_and_is_not_called_a_crash():
    with pytest.raises(MeasureError) as caught:
        _compare("HANG", run_timeout_s=0.3)
    assert str(caught.value) == ("peer hang: no answer to 'run' within 0.3 s, so it was killed")


def test_an_exception_of_the_engine_is_told_with_its_type():
    with pytest.raises(MeasureError) as caught:
        _compare("RAISE")
    assert str(caught.value) == "peer raise: ValueError: scripted trouble"


def test_an_error_of_our_own_keeps_its_class_and_parts():
    with pytest.raises(UnsupportedError) as caught:
        _compare("REFUSE")
    assert str(caught.value) == "peer refuse: node 7: no such operator: Fizz. Use another peer"


def test_engines_that_fail_can_be_left_out(children, monkeypatch):
    said, read_line = [], process.WorkerProcess._read_line

    def read(worker, timeout_s):  # only one is known to give no answer
        return read_line(worker, timeout_s if worker.name == "hang" else 60)

    monkeypatch.setattr(process.WorkerProcess, "_read_line", read)
    result = _compare(
        "DOUBLE",
        "SEGFAULT",
        "REFUSE",
        "HANG",
        "TIRED",
        "WRONG",
        subject="double",
        leave_out=True,
        run_timeout_s=1,
        progress=said.append,
    )
    assert [row.name for row in result.rows] == ["double", "wrong"]
    assert [len(row.times_ns) for row in result.rows] == [2, 2]
    assert result.speedup.over == "wrong"
    assert list(result.left_out) == ["segfault", "refuse", "hang", "tired"]
    assert result.left_out["refuse"] == ("peer refuse: node 7: no such operator: Fizz. Use another peer")
    assert result.left_out["tired"] == "peer tired: RuntimeError: enough"
    assert "round 2 of 2" in said
    assert len(children) == 6


def test_the_subject_is_never_left_out():
    with pytest.raises(UnsupportedError, match="peer refuse: node 7"):
        _compare("DOUBLE", "REFUSE", subject="refuse", leave_out=True)


def test_without_any_engine_there_is_no_comparison():
    with pytest.raises(MeasureError) as caught:
        _compare("RAISE", leave_out=True)
    assert str(caught.value) == "compare: peer raise: ValueError: scripted trouble"


def test_what_a_killed_engine_has_started_ends_with_it(tmp_path, monkeypatch):
    path, read_line = tmp_path / "pid", process.WorkerProcess._read_line

    def read(worker, timeout_s):  # time begins to run out when there is something to end
        for _ in range(1200):
            if path.exists() and path.read_text("utf-8"):
                break
            threading.Event().wait(0.05)
        return read_line(worker, timeout_s)

    monkeypatch.setattr(process.WorkerProcess, "_read_line", read)
    spec = RunnerSpec("fake_peers:COMPILING", path, label="compiling")
    with pytest.raises(MeasureError, match=r"no answer to 'prepare' within 0\.2 s"):
        compare([spec], INPUTS, Settings(1, 1, prepare_timeout_s=0.2))
    pid = int(path.read_text("utf-8"))
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):  # the system may need a moment to bury it
        if not state.exists() or state.read_text("utf-8").split(") ")[1][0] == "Z":
            return
        threading.Event().wait(0.05)
    pytest.fail(f"process {pid} still runs")


def test_an_absent_engine_is_refused_before_anything_starts(children):
    with pytest.raises(UnsupportedError) as caught:
        _compare("DOUBLE", "ABSENT")
    assert str(caught.value) == ("peer absent: the Python package fizz is not installed. Run: pip install fizz")
    assert children == []


def test_an_interrupt_leaves_no_process(children):
    def interrupt(line):
        if line.startswith("round"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _compare("DOUBLE", "SPIN", progress=interrupt)
    assert len(children) == 2


def test_senseless_arguments_are_refused():
    with pytest.raises(OptionError, match="there is nothing to compare"):
        _compare()
    with pytest.raises(OptionError, match="two runners are called 'double'; expected a label"):
        _compare("DOUBLE", "DOUBLE")
    with pytest.raises(OptionError, match="the value 0 is too small"):
        _compare("DOUBLE", rounds=0)
    with pytest.raises(OptionError, match="the value 0 is too small"):
        _compare("DOUBLE", threads=0)
    with pytest.raises(OptionError, match="there is no engine 'xla'; expected korch, onnxruntime"):
        compare([RunnerSpec("xla", Path("m.onnx"))], INPUTS, Settings(1))


def test_text_of_a_comparison():
    rows = (
        Row("korch", 80.0, 79.0, 90.0, 1.5e-6, (80_000_000,) * 15, 25_400_000, 0.42),
        Row("onnxruntime", 120.25, 119.0, 130.0, 0.0, (120_250_000,) * 15),
    )
    speedup = Speedup("onnxruntime", 1.503, 1.45, 1.61)
    left_out = {"iree": "peer iree: can't compile the model: no Fizz"}
    whole = Comparison(rows, "korch", speedup, 2, ("korch",), left_out=left_out)
    assert whole.to_text() == (
        "             median ms    p10 ms    p90 ms  max error    memory     ready\n"
        "korch           80.000    79.000    90.000    1.5e-06     25 MB     0.4 s\n"
        "onnxruntime    120.250   119.000   130.000    0.0e+00\n"
        "korch is 1.50x as fast as onnxruntime (1.45x to 1.61x); 15 rounds, 2 threads\n"
        "still busy after their turns: korch\n"
        "left out: peer iree: can't compile the model: no Fizz"
    )
    assert whole.to_json()["left_out"] == left_out
    assert Comparison(rows[:1], "korch", None, 2).to_text().endswith("\n15 rounds, 2 threads")
