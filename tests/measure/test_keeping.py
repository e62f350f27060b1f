"""What the database keeps of a candidate: facts about its kernel, not about a bad moment."""

from types import SimpleNamespace

import pytest

from korch.candidate.candidate import Candidate, Offer, make_group
from korch.measure.calibrate import FACT, Calibration, Level
from korch.measure.cpu import CpuMeter
from korch.measure.record import AGAIN, Failed, Measured, is_lasting
from korch.options import Options
from korch.primitive.text import parse_graph

RATES = Calibration((Level(0, 1e10, 1e10),), 1e11, 1.0, 500.0)
LASTING = (
    Measured(5, 0.0, (5,)), Failed("refused", "no"), Failed("not compiled", "error"),
    Failed("not created", "no"), Failed("failed", "7"), Failed("crashed", "SIGSEGV"),
    Failed("hung", "10 s"),
)  # fmt: skip
KILLED = Failed("killed", "the system killed it")


@pytest.fixture
def meter(tmp_path, monkeypatch):
    monkeypatch.setattr("korch.measure.cpu.calibrate", lambda timer, target: RATES)
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
    group = make_group(parse_graph(
        'graph(%0 "x": f32[16], %1 "y": f32[16]) -> (%2 "z")\n'
        "%2: f32[32] = concat(%0, %1) {axis=0}\n"
    ), [0], [2])  # fmt: skip
    (provider,) = (p for p in meter.providers if p.name == "in place")
    candidates = [
        Candidate(group, provider.name, offer, provider.version)
        for offer in provider.offer(group, meter.target)
    ]
    assert len(candidates) == 1
    (record,) = meter.measure(candidates)
    assert meter.confirm(candidates) == [record]
    assert (record.time_ns, meter.cost_ns(candidates[0])) == (0, (0, True))
    assert meter.bound_ns(candidates[0]) == meter.guess_ns(candidates[0]) == 0
    assert meter.database.record(candidates[0].key) is None
