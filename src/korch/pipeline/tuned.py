"""Adds the provider of kernels that TVM tunes to a search that asks for it (`SearchLimits.tvm_seconds`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from korch.candidate.candidate import Candidate
from korch.errors import OptionError
from korch.measure.cpu import CpuMeter
from korch.measure.meter import AnyMeter
from korch.measure.record import Measured, Record
from korch.options import Options
from korch.provider.provider import Kernel
from korch.provider.tvm import TvmProvider
from korch.search.ledger import Ledger
from korch.system.deadline import Deadline


def add_tvm(meter: AnyMeter, options: Options, deadline: Deadline, *, tunes: bool) -> TvmProvider | None:
    """Add the provider to a CPU's meter; None if the options do not ask for it.

    `tunes`: whether groups are tuned; a replay takes their kernels from its ledger.

    Raises:
        OptionError: TVM is not installed, or kernels are not timed on a CPU.
    """
    seconds = options.search.tvm_seconds
    if not seconds:
        return None
    if not isinstance(meter, CpuMeter) or not options.measure:
        raise OptionError(
            "TVM tunes kernels for CPUs by timing them", "option tvm_seconds", hint="Set it to 0, or measure on a CPU"
        )
    own = meter

    def timed(trials: Sequence[Candidate], kernels: dict[str, Kernel], end: Deadline) -> list[int | str | None]:
        new = [trial for trial in trials if own.known(trial) is None]
        if new:
            own.measure_batch(new, kernels, end)
        return [_answer(own.known(trial)) for trial in trials]

    try:
        provider = TvmProvider(own.database, timed, seconds if tunes else 0.0, deadline)
    except ImportError as error:
        raise OptionError(str(error), "option tvm_seconds") from error
    own.add_provider(provider)
    return provider


def _answer(record: Record | None) -> int | str | None:
    if record is None:
        return None
    return record.time_ns if isinstance(record, Measured) else record.message


def keep_tuned(meter: AnyMeter, ledger: Ledger, plans: Iterable[Sequence[Candidate]]) -> None:
    """Record the tuned kernels of plans in the ledger, or take them from it in a replay."""
    for provider in meter.providers:
        if isinstance(provider, TvmProvider):
            provider.keep([step for plan in plans for step in plan], ledger.answer)
