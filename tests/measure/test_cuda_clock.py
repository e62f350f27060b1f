"""Times on the device contain nothing of the host, if the host can be ahead."""

import pytest

from korch.cuda.measure.clock import MOST_CYCLES, SLEEP_CYCLES, elapsed_ms
from tests.support.fake_clock import CYCLES_PER_MS, FakeTorch


@pytest.mark.parametrize(("host_ms", "device_ms"), [(0.0, 0.1), (0.01, 0.002), (0.3, 0.1), (2.0, 0.5)])
def test_only_the_device_counts(host_ms, device_ms):
    torch = FakeTorch()
    torch.work(0.0, 1.0)  # earlier work
    assert elapsed_ms(torch, lambda: torch.work(host_ms, device_ms), 4) == pytest.approx(device_ms)
    assert torch.slept > 4 * host_ms


def test_a_short_run_waits_for_a_short_sleep_only():
    torch = FakeTorch()
    elapsed_ms(torch, lambda: torch.work(0.01, 0.1))
    assert torch.slept == SLEEP_CYCLES / CYCLES_PER_MS


def test_a_host_that_is_too_slow_counts():
    torch = FakeTorch()
    assert elapsed_ms(torch, lambda: torch.work(100.0, 0.1)) > 50
    assert torch.slept == MOST_CYCLES / CYCLES_PER_MS
