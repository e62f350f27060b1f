"""A host and a device that work in simulated time, to test how work on a device is timed."""

from __future__ import annotations

from types import SimpleNamespace

CYCLES_PER_MS = 1 << 21
LAUNCH_MS = 0.01


class FakeTorch:
    """The part of PyTorch with which work is issued and timed; times are in milliseconds."""

    def __init__(self) -> None:
        self.host = self.device = self.slept = 0.0
        self.cuda = SimpleNamespace(Event=self._event, _sleep=self._sleep, synchronize=self._synchronize)

    def work(self, host_ms: float, device_ms: float) -> None:
        """Let the host work, and then issue work for the device."""
        self.host += host_ms
        self.device = max(self.device, self.host) + device_ms

    def _sleep(self, cycles: int) -> None:
        self.slept = cycles / CYCLES_PER_MS
        self.work(LAUNCH_MS, self.slept)

    def _synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def _event(self, enable_timing: bool) -> _Event:
        assert enable_timing
        return _Event(self)


class _Event:
    def __init__(self, torch: FakeTorch) -> None:
        self.torch, self.at = torch, 0.0

    def record(self) -> None:
        """Record when the device has done all earlier work."""
        self.torch.work(LAUNCH_MS, 0.0)
        self.at = self.torch.device

    def query(self) -> bool:
        """Return whether the event is over."""
        return self.at <= self.torch.host

    def synchronize(self) -> None:
        """Wait for the event."""
        self.torch.host = max(self.torch.host, self.at)

    def elapsed_time(self, end: _Event) -> float:
        """Return the time between two events."""
        return end.at - self.at
