"""A plan without a device: its kernels are compiled and described, but nothing runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from korch.candidate.candidate import Candidate, Refusal
from korch.cuda.compile import Cubin
from korch.cuda.kernel import CudaKernel, Launch
from korch.cuda.measure.meter import CudaMeter
from korch.records import plain
from korch.runtime.report import Report
from korch.runtime.text import counted


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """The compiler's facts on one launch, or why there is no cubin."""

    symbol: str
    programs: int
    warps: int
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel of a plan."""

    provider: str  # the provider that makes it
    operations: str  # the names of its operations
    layouts: str  # the layouts of its inputs and outputs
    bound_ns: int  # the lower bound of its time
    launches: tuple[LaunchReport, ...]  # its launches; empty for a call of a library
    failure: str = ""  # why it could not be made; "" if it was

    @property
    def is_fit(self) -> bool:
        """Whether all of its launches were compiled."""
        return not self.failure and not any(launch.failure for launch in self.launches)


@dataclass(frozen=True)
class DryRun:
    """A plan whose costs are bounds, with the compiler's facts on its kernels."""

    target: str  # the device that it is for
    kernels: tuple[KernelReport, ...]  # the kernels in order
    report: Report  # how the plan was found
    launches: tuple[Launch, ...] = ()  # all launches, so that they can be compiled for another device

    @property
    def failures(self) -> list[KernelReport]:
        """The kernels that could not be made or compiled."""
        return [kernel for kernel in self.kernels if not kernel.is_fit]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "target": self.target,
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "report": plain(self.report),
        }

    def to_text(self) -> str:
        """Return a table of the kernels."""
        report = self.report
        lines = [
            f"{self.target}: {counted(len(self.kernels), 'kernel')}, at least {report.predicted_ms:.3f} ms "
            f"(bounds, nothing was measured); {report.candidates} candidates, "
            f"{report.given_flop / 1e9:.2f} GFLOP as given",
            f"{'#':>3} {'bound':>10} {'programs':>9} {'warps':>5} {'regs':>4} {'spill':>5} "
            f"{'shared':>9}  {'provider':16} what it computes",
        ]
        for number, kernel in enumerate(self.kernels):
            head = f"{number:>3} {kernel.bound_ns / 1e3:>7.1f} us"
            tail = f"  {kernel.provider:16} {kernel.operations[:70]} {kernel.layouts}"
            if kernel.failure:
                lines.append(f"{head} {kernel.failure}{tail}")
            if not kernel.launches:
                lines.append(f"{head} {'a call of the library':>36}{tail}")
            for launch in kernel.launches:
                if launch.failure:
                    lines.append(f"{head} not compiled: {launch.failure}{tail}")
                    continue
                lines.append(
                    f"{head} {launch.programs:>9} {launch.warps:>5} {launch.registers:>4} "
                    f"{launch.spill_bytes:>5} {launch.shared_bytes:>9}{tail}"
                )
                head, tail = " " * 14, ""
        return "\n".join(lines)


def dry_run(steps: Sequence[Candidate], meter: CudaMeter, report: Report) -> DryRun:
    """Compile the kernels of a plan.

    `steps`: the candidates of the plan, in order.
    """
    built: list[CudaKernel | Refusal] = [meter.kernel(candidate) for candidate in steps]
    made = [kernel for kernel in built if isinstance(kernel, CudaKernel)]
    everything = tuple(launch for kernel in made for launch in kernel.launches)
    cubins = meter.compiler.compile(everything)
    kernels = []
    for candidate, kernel in zip(steps, built, strict=True):
        launches: list[LaunchReport] = []
        for launch in kernel.launches if isinstance(kernel, CudaKernel) else ():
            cubin = cubins[launch.symbol]
            if isinstance(cubin, Cubin):
                launches.append(
                    LaunchReport(
                        launch.symbol, launch.grid, launch.warps, cubin.registers, cubin.spill_bytes, cubin.shared_bytes
                    )
                )
            else:
                launches.append(LaunchReport(launch.symbol, launch.grid, launch.warps, failure=cubin.message))
        kernels.append(
            KernelReport(
                candidate.provider,
                " ".join(p.op for p in candidate.group.body.primitives) or "layout change",
                candidate.offer.layouts,
                meter.bound_ns(candidate),
                tuple(launches),
                kernel.reason if isinstance(kernel, Refusal) else "",
            )
        )
    return DryRun(f"{meter.target.name} ({meter.target.isa})", tuple(kernels), report, everything)
