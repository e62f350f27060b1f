"""What is known of a candidate's cost: a measured time, or why there is none.

"Slow", "crashed", "refused" and "not tried" are different facts and have different types.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

FailureKind = Literal["refused", "not compiled", "not created", "failed", "crashed", "hung", "killed"]
"""Killed: the system ended the kernel's process or its compiler, most likely because memory ran out."""


AGAIN = ", nor in an earlier session"
"""The end of the message of a kernel that hung in two sessions."""


DISTURBED_SHARE = 0.02
"""A run is disturbed if a thread of it had no core for a larger share of its time."""

DISTURBED_NS = 1000
"""A shorter time without a core is normal: a thread that wakes up has one."""

MOST_AWAY = 0.9
"""A run in which a thread had no core for a larger share is dropped."""

CLEAN_SAMPLES = 3
"""If at least this number of runs, or half of all, is undisturbed, the others do not count."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured time.

    Attributes:
        time_ns: the low quantile of the samples.
        samples_ns: nanoseconds per run, in the order in which they were taken.
        is_confirmed: whether it was timed a second time, in another batch.
        disturbed: how many runs were disturbed: a thread had no core for a part of them.
        is_disturbed: whether too few were not. Then the samples are all runs, each less the time
            for which it had no core. That is an estimate, and not kept for another search.
    """

    time_ns: int
    samples_ns: tuple[int, ...]
    is_confirmed: bool = False
    disturbed: int = 0
    is_disturbed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A kernel that can't be used, and why; its candidate is excluded."""

    kind: FailureKind
    message: str


Record = Measured | Failed


def is_lasting(record: Record) -> bool:
    """Return whether a record will be as true next time.

    What the system killed may then live, and what was always disturbed may then be left alone.
    """
    if isinstance(record, Failed):
        return record.kind != "killed"
    return not record.is_disturbed


def is_worth_retrying(record: Record) -> bool:
    """Return whether a record of another session says that a kernel hung, once only.

    A busy machine may have been the cause. What hung in two sessions is left alone.
    """
    return isinstance(record, Failed) and record.kind == "hung" and AGAIN not in record.message


def retried(record: Record) -> Record:
    """Return the record of a kernel that hung in another session, marked if it did so again."""
    if isinstance(record, Failed) and record.kind == "hung":
        return Failed("hung", f"{record.message}{AGAIN}")
    return record


def confirmed(first: Measured, again: Record) -> Record:
    """Return what two measurements say together: the longer time, so that costs only rise.

    Of a disturbed and an undisturbed one, the latter counts.
    """
    if isinstance(again, Failed):
        return again if is_lasting(again) else replace(first, is_confirmed=True)
    best = max(first, again, key=lambda record: (not record.is_disturbed, record.time_ns))
    return replace(best, is_confirmed=True, disturbed=first.disturbed + again.disturbed)


def to_text(record: Record) -> str:
    """Return a record as one line of JSON."""
    if isinstance(record, Failed):
        return json.dumps({"kind": record.kind, "message": record.message})
    return json.dumps(
        {
            "time_ns": record.time_ns,
            "samples_ns": record.samples_ns,
            "is_confirmed": record.is_confirmed,
            "disturbed": record.disturbed,
        }
    )


def from_text(text: str) -> Record:
    """Return the record that `to_text` gives as `text`.

    Raises:
        ValueError: there is none.
    """
    try:
        data = json.loads(text)
        if "kind" in data:
            return Failed(data["kind"], str(data["message"]))
        return Measured(
            int(data["time_ns"]),
            tuple(data["samples_ns"]),
            bool(data.get("is_confirmed", False)),
            int(data.get("disturbed", 0)),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record: {text[:80]!r}") from error


def is_disturbed(sample_ns: int, away_ns: int) -> bool:
    """Return whether a run says little of its kernel, as a thread had no core for some of it."""
    return away_ns > max(DISTURBED_NS, DISTURBED_SHARE * sample_ns)


def is_enough(clean: int, samples: int) -> bool:
    """Return whether the undisturbed ones of some samples are enough to leave out the others."""
    return clean >= min(CLEAN_SAMPLES, max(1, samples / 2))


def summarize(samples_ns: Sequence[int], away_ns: Sequence[int] = ()) -> Measured:
    """Return the measurement that samples give: a low quantile, robust to busy neighbours.

    Args:
        samples_ns: of each run, nanoseconds.
        away_ns: of each run, how long a thread of it had no core; 0 for all if it is left out.
    """
    pairs = list(zip(samples_ns, away_ns or [0] * len(samples_ns), strict=True))
    used = [sample for sample, away in pairs if not is_disturbed(sample, away)]
    disturbed = len(pairs) - len(used)
    is_clean = is_enough(len(used), len(pairs))
    if not is_clean:
        used = [sample - away for sample, away in pairs if away <= MOST_AWAY * sample] or list(samples_ns)
    ordered = sorted(used)

    def quantile(share: float) -> int:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    # What a thread waited may not have been in the way of the others: then too much is subtracted.
    time_ns = max(1, quantile(0.2 if is_clean else 0.5))
    return Measured(time_ns, tuple(used), disturbed=disturbed, is_disturbed=not is_clean)
