"""The time of each kernel of a plan within complete runs, and its time measured alone.

If the two times agree for all kernels, the sum of the times measured alone predicts a run well. If a
kernel takes much longer within a run, its inputs are then in another cache, or on another core, than
when it was measured alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from korch.report.kernel import operations
from korch.report.threads import ThreadLoad
from korch.runtime.executable import Executable


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The times of a kernel of a plan, in nanoseconds.

    Attributes:
        number: its index in the plan.
        provider: the provider that made it.
        what: its operations.
        alone_ns: its measured cost, or its bound.
        is_measured: whether `alone_ns` is a measured cost.
        median_ns: the median time within runs.
        p10_ns: the 10th percentile.
        p90_ns: the 90th percentile.
    """

    number: int
    provider: str
    what: str
    alone_ns: float
    is_measured: bool
    median_ns: float
    p10_ns: float
    p90_ns: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The times of all kernels, and of whole runs.

    Attributes:
        kernels: the times of the kernels, in the order of the plan.
        run_ns: the median time of a whole run.
        rounds: the number of runs.
        loads: how evenly the threads of each kernel work; empty if that was not recorded.
    """

    kernels: tuple[KernelTime, ...]
    run_ns: float
    rounds: int
    loads: tuple[ThreadLoad | None, ...] = ()

    @property
    def running(self) -> tuple[KernelTime, ...]:
        """The kernels without concatenations in place, which do not run."""
        return tuple(k for k in self.kernels if k.alone_ns or not k.is_measured)

    def to_text(self, most: int = 30) -> str:
        """Return a table of the slowest kernels, with sums for each provider and for the plan."""
        total = sum(kernel.median_ns for kernel in self.kernels) or 1.0
        slowest = sorted(self.running, key=lambda kernel: -kernel.median_ns)[:most]
        lines = [
            f"{'#':>4} {'in the run':>11} {'p10':>9} {'p90':>9} {'share':>6} {'alone':>10} "
            f"{'ratio':>6}  {self._load_text(None)}{'provider':11} what it computes"
        ]
        for k in slowest:
            alone = f"{'' if k.is_measured else '≥'}{k.alone_ns / 1e3:.1f}"
            ratio = f"{k.median_ns / k.alone_ns:.2f}" if k.is_measured and k.alone_ns else "-"
            lines.append(
                f"{k.number:>4} {k.median_ns / 1e3:>8.1f} us {k.p10_ns / 1e3:>9.1f} "
                f"{k.p90_ns / 1e3:>9.1f} {100 * k.median_ns / total:>5.1f}% {alone:>10} "
                f"{ratio:>6}  {self._load_text(k)}{k.provider:<11} {k.what}"
            )
        if len(self.running) > most:
            lines.append(f"and {len(self.running) - most} more")
        if self.loads:
            lines.append(
                "longest: the time of the thread that works longest, divided by the mean of all threads; idle: the "
                "share of all threads' time without work; -: no parallel region was recorded"
            )
        lines.append("")
        lines += self._sums()
        return "\n".join(lines)

    def _load_text(self, kernel: KernelTime | None) -> str:
        """Return the columns on a kernel's threads (the titles if `kernel` is None); "" if there is no record."""
        if not self.loads:
            return ""
        if kernel is None:
            return f"{'longest':>7} {'idle':>6}  "
        load = self.loads[kernel.number]
        if load is None:
            return f"{'-':>7} {'-':>6}  "
        return f"{load.longest:>7.2f} {100 * load.idle:>5.1f}%  "

    def _sums(self) -> list[str]:
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for kernel in self.running:
            for name in (kernel.provider, "all kernels"):
                for i, value in enumerate((1, kernel.median_ns, kernel.alone_ns)):
                    sums[name][i] += value
        whole = sums.pop("all kernels", [0, 0.0, 0.0])
        rows = [*sorted(sums.items(), key=lambda row: -row[1][1]), ("all kernels", whole)]
        lines = [
            f"{name:12} {count:>4.0f} kernel{'s' if count != 1 else ' '} {run_ns / 1e6:>9.3f} ms in the run "
            f"{alone_ns / 1e6:>9.3f} ms alone ({run_ns / max(alone_ns, 1.0):.2f})"
            for name, (count, run_ns, alone_ns) in rows
        ]
        lines.append(f"{'a whole run':12} {'':12} {self.run_ns / 1e6:>9.3f} ms, median of {self.rounds}")
        return lines


def profile(executable: Executable, arrays: Sequence[Any], rounds: int = 30) -> Profile:
    """Return the times of the kernels of an executable within complete runs.

    `rounds`: the number of runs; three more runs before them are not counted.

    Raises:
        InputError: an array has another shape or type, or there are too few or too many.
        ProviderError: a kernel failed.
    """
    executable.time(arrays, 3)
    timing = executable.time(arrays, rounds)
    times = np.array(timing.kernel_ns, float).reshape(rounds, len(executable.plan.steps))
    kernels = tuple(
        KernelTime(
            i,
            step.provider,
            operations(step),
            float(step.cost_ns),
            step.is_measured,
            *(float(np.percentile(times[:, i], p)) for p in (50, 10, 90)),
        )
        for i, step in enumerate(executable.plan.steps)
    )
    return Profile(kernels, float(np.median(timing.run_ns)), rounds)
