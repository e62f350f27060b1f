"""The expected time of a run, computed from samples of its kernels."""

import numpy as np
import pytest

from korch.measure.expect import expect
from korch.measure.record import Failed, Measured, summarize


def interrupted(time_ns, rng, count=40, share=0.05, extra_ns=80_000):
    """Return samples of a kernel of which some were interrupted."""
    samples = time_ns * rng.uniform(1.0, 1.02, count) + extra_ns * (rng.random(count) < share)
    return summarize([int(sample) for sample in samples])


def test_it_is_what_runs_take_of_which_some_kernels_are_interrupted():
    rng = np.random.default_rng(1)
    records = [interrupted(t, rng) for t in range(20_000, 120_000, 1000)]
    costs = [(record.time_ns, record) for record in records]
    times = [sum(int(rng.choice(r.samples_ns)) for r in records) for _ in range(300)]
    found = expect(costs)
    assert found.median_ns == pytest.approx(np.median(times), rel=0.01)
    assert found.p10_ns == pytest.approx(np.percentile(times, 10), rel=0.02)
    assert found.p90_ns == pytest.approx(np.percentile(times, 90), rel=0.02)
    assert found.median_ns > 1.03 * sum(cost_ns for cost_ns, _ in costs)


def test_what_a_cost_has_beyond_its_samples_is_added():
    record = Measured(100, (100, 100, 100))
    assert expect([(120, record), (100, record)]).median_ns == 220
    assert expect([]).median_ns == 0


@pytest.mark.parametrize("record", [None, Failed("hung", ""), Measured(100, ())])
def test_without_samples_nothing_is_expected(record):
    assert expect([(100, Measured(100, (100,))), (100, record)]) is None
