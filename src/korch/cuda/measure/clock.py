"""Times work on the device without the host's part in it.

The device sleeps until the host has issued everything: the events and all that is timed between them. So neither
Python nor the launch of the first graph is inside of the time.
"""

from collections.abc import Callable
from typing import Any

SLEEP_CYCLES, MOST_CYCLES = 1 << 18, 1 << 26
"""How long the device sleeps at first, and at most, in cycles: about 0.14 ms and 35 ms."""


def elapsed_ms(torch: Any, run: Callable[[], object], runs: int = 1) -> float:
    """Return the milliseconds on the device, for each of some runs on PyTorch's current stream.

    If the device has awoken before everything was issued, the runs are timed again behind a longer sleep. The last time
    counts in any case, so runs that need much time of the host, or wait for the device, include that time.
    """
    cycles = SLEEP_CYCLES
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        was_asleep = not begin.query()
        end.synchronize()
        if was_asleep or cycles >= MOST_CYCLES:
            return float(begin.elapsed_time(end)) / runs
        cycles *= 4
