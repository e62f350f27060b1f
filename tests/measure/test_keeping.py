"""What the database keeps of a candidate: lasting facts about its kernel, not temporary failures."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from korch.candidate.candidate import Candidate, Offer, make_group
from korch.costs.rates import Calibration, MemoryLevel
from korch.measure.calibrate import FACT
from korch.measure.cpu import CpuMeter
from korch.measure.record import AGAIN, Failed, Measured, is_lasting
from korch.options import Options
from korch.primitive.text import parse_graph
from korch.provider.generated import GeneratedProvider

RATES = Calibration((MemoryLevel(0, 1e10, 1e10),), 1e11, 1.0, 500.0)
LASTING = (
    Measured(5, (5,)),
    Failed("refused", "no"),
    Failed("not compiled", "error"),
    Failed("not created", "no"),
    Failed("failed", "7"),
    Failed("crashed", "SIGSEGV"),
    Failed("hung", "10 s"),
)
KILLED = Failed("killed", "the system killed it")


@pytest.fixture
def meter(tmp_path, monkeypatch):
    monkeypatch.setattr("korch.measure.cpu.calibrate", lambda *_: RATES)
    with CpuMeter(Options(cache_folder=tmp_path), ()) as made:
        yield made


@pytest.mark.parametrize("record", LASTING, ids=lambda r: getattr(r, "kind", "measured"))
def test_what_is_true_of_a_kernel_lasts(record):
    assert is_lasting(record)


def test_what_the_system_killed_is_tried_again_next_time(meter):
    meter.keep("killed", KILLED)
    meter.keep("crashed", LASTING[5])
    assert meter._records == {"killed": KILLED, "crashed": LASTING[5]}
    assert meter.database.record("killed") is None
    assert meter.database.record("crashed") == LASTING[5]


def test_a_calibration_that_was_measured_in_another_way_is_not_taken(meter):
    """Its rates could be too low, and bounds made of them too high."""
    assert meter.database.fact("calibration") is None
    assert meter.database.fact(FACT) == meter.calibration.to_text() == RATES.to_text()


@pytest.mark.parametrize(
    ("budget_s", "seconds", "is_kept"), [(8.0, -1.0, False), (8.0, 99.0, True), (None, -1.0, True)]
)
def test_a_calibration_that_a_budget_shortens_is_not_kept(tmp_path, monkeypatch, budget_s, seconds, is_kept):
    """Also not for a model with large weights, which has records of its own."""
    monkeypatch.setattr("korch.measure.cpu.calibrate", lambda *_: RATES)
    monkeypatch.setattr("korch.measure.cpu.CALIBRATION_LIMIT_S", seconds)
    monkeypatch.setattr("korch.measure.cpu.CALIBRATION_SHARE", 20.0)
    with CpuMeter(Options(cache_folder=tmp_path, budget_s=budget_s), (), weights_bytes=1 << 50) as made:
        assert made.calibration == RATES and made.reads_weights_from_memory
        assert (made.database.fact(FACT) is not None) == is_kept


def test_a_short_budget_leaves_little_for_the_calibration(tmp_path, monkeypatch):
    ends = []
    monkeypatch.setattr("korch.measure.cpu.calibrate", lambda target, builder, end: ends.append(end.left_s) or RATES)
    for budget_s in (10.0, 1000.0):
        CpuMeter(Options(cache_folder=tmp_path / str(budget_s), budget_s=budget_s), ()).close()
    assert ends == [pytest.approx(0.5, abs=0.1), pytest.approx(5.0, abs=0.2)]


@pytest.mark.parametrize("then", [LASTING[6], LASTING[0]], ids=lambda r: getattr(r, "kind", "ran"))
def test_what_hung_is_tried_once_more_in_another_session(meter, then):
    candidate = SimpleNamespace(key="slow", offer=Offer((), ()))
    meter.keep("slow", LASTING[6])
    assert meter.known(candidate) == LASTING[6]
    meter._records.clear()  # another session
    assert meter.known(candidate) is None
    meter.keep("slow", then)
    meter._records.clear()
    kept = meter.known(candidate)
    assert kept == (then if isinstance(then, Measured) else Failed("hung", "10 s" + AGAIN))


def test_what_runs_nothing_is_known_and_never_timed(meter):
    group = make_group(
        parse_graph('graph(%0 "x": f32[16], %1 "y": f32[16]) -> (%2 "z")\n%2: f32[32] = concat(%0, %1) {axis=0}\n'),
        [0],
        [2],
    )
    (provider,) = (p for p in meter.providers if p.name == "in place")
    candidates = [
        Candidate(group, provider.name, offer, provider.version) for offer in provider.offer(group, meter.target)
    ]
    assert len(candidates) == 1
    (record,) = meter.measure(candidates)
    assert meter.confirm(candidates) == [record]
    assert (record.time_ns, meter.cost_ns(candidates[0])) == (0, (0, True))
    assert meter.bound_ns(candidates[0]) == meter.predict(candidates)[0][0] == 0
    assert meter.database.record(candidates[0].key) is None


class Broken(GeneratedProvider):
    """Its kernels do not compile."""

    def build(self, group, offer, target):
        kernel = super().build(group, offer, target)
        return dataclasses.replace(kernel, source=kernel.source.replace("ret i32 0", "ret i32 missing"))


@pytest.mark.uncompiled
def test_a_kernel_that_does_not_compile_is_counted_in_each_session(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("korch.measure.cpu.calibrate", lambda *_: RATES)
    graph = parse_graph('graph(%0 "x": f32[4]) -> (%1 "y")\n%1: f32[4] = exp(%0)\n')
    group = make_group(graph, [0], [1])
    candidate = Candidate(group, "generated", Offer(*group.plain_layouts))
    for session in ("the first", "the second"):
        with CpuMeter(Options(cache_folder=tmp_path), (Broken(),)) as meter:
            assert not meter.uncompiled
            (record,) = meter.measure([candidate])
            assert record.kind == "not compiled" and "missing" in record.message
            (row,) = meter.uncompiled.values()
        assert row.candidate == str(candidate) and row.message == record.message
        text = Path(row.file).read_text("utf-8")
        assert "f32[4] = exp(%0)" in text and "error: " in text and "ret i32 missing" in text
        assert ("a kernel does not compile: " in caplog.text) == (session == "the first")
        caplog.clear()
