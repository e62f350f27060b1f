"""Kernels timed at some sizes of a range -> predicted times at another size, and the kernels that may win there.

A function of the sizes is fitted to the times of each kernel (one schedule with one blocking). The kernels of the
known plans are timed at the new size first, which gives the error of the predictions. Kernels that lose even if this
error is allowed for are left out.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.measure.record import Measured
from korch.ranges.cost import TimedSizes, fit, line
from korch.ranges.form import Sizes
from korch.search.ledger import Ledger

# Least relative error assumed for times predicted from other sizes: repeated measurements of one kernel differ by as
# much.
PREDICTED_ERROR = 0.03
# A kernel is left out at another size if it is slower than the best one there even when its predicted time is lowered,
# and that of the best one raised, by this many times the error.
PREDICTED_MARGIN = 3.0

logger = logging.getLogger("korch.pipeline")

LEAST_SAMPLES = 2

Ports = tuple[tuple[int, Layout], ...]


@dataclass(frozen=True)
class Predicted:
    """Times of kernels at sizes at which they were not timed.

    Attributes:
        times_ns: the predicted times, by key of the candidate at these sizes.
        error: the median relative error of such predictions; None if it is not known.
    """

    times_ns: Mapping[str, int]
    error: float | None


def at_sizes(candidate: Candidate, sizes: Sizes) -> Candidate:
    """Return the same candidate, to be timed for other sizes."""
    return candidate if candidate.served is None else replace(candidate, served=replace(candidate.served, sizes=sizes))


def predict(candidates: Sequence[Candidate], sizes: Sizes, seen: Sequence[Sizes], ledger: Ledger) -> Predicted:
    """Predict the times of candidates at some sizes from their times at other sizes.

    Args:
        candidates: candidates for `sizes`; the error is computed from those that were timed there.
        sizes: the size of each dimension.
        seen: the other sizes.
        ledger: has the measured times.
    """
    times_ns, errors = {}, []
    for candidate in {c.key: c for c in candidates if c.served is not None}.values():
        samples = [sample for other in seen if (sample := _sample(at_sizes(candidate, other), other, ledger))]
        if len(samples) < LEAST_SAMPLES:
            continue
        cost = (line if len(samples) == LEAST_SAMPLES else fit)(samples)
        known = _sample(candidate, sizes, ledger)
        if known is not None:
            errors.append(abs(cost.at(sizes) / known.time_ns - 1))
        else:
            times_ns[candidate.key] = round(cost.at(sizes))
    return Predicted(times_ns, max(PREDICTED_ERROR, statistics.median(errors)) if errors else None)


def _sample(candidate: Candidate, sizes: Sizes, ledger: Ledger) -> TimedSizes | None:
    record = ledger.records.get(candidate.key)
    return TimedSizes(sizes, max(1.0, record.time_ns)) if isinstance(record, Measured) else None


def without_losers(candidates: Iterable[Candidate], predicted: Predicted, ledger: Ledger) -> tuple[Candidate, ...]:
    """Return the candidates without those that another one for the same group and layouts likely beats."""
    candidates = tuple(candidates)
    if predicted.error is None:
        return candidates
    most, least_ns = 1 + PREDICTED_MARGIN * predicted.error, dict[tuple[str, Ports, Ports], float]()
    for candidate in candidates:
        cost_ns, is_measured = ledger.cost_ns(candidate)
        if not is_measured and candidate.key not in predicted.times_ns:
            continue
        time_ns = cost_ns if is_measured else most * predicted.times_ns[candidate.key]
        role = _role(candidate)
        least_ns[role] = min(time_ns, least_ns.get(role, time_ns))
    kept = tuple(
        c for c in candidates if predicted.times_ns.get(c.key, 0) <= most * least_ns.get(_role(c), float("inf"))
    )
    logger.info(
        "%d of %d kernels are left out by their times at other sizes, which predict within %.0f %%",
        len(candidates) - len(kept), len(candidates), 100 * predicted.error,
    )  # fmt: skip
    return kept


def _role(candidate: Candidate) -> tuple[str, Ports, Ports]:
    return candidate.group.key, candidate.input_ports, candidate.output_ports
