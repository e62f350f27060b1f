"""Records of candidates' costs: a measured time, or the reason why there is none.

"Slow", "crashed", "refused" and "not tried" are different facts and have different types.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

FailureKind = Literal["refused", "raised", "not compiled", "not created", "failed", "crashed", "hung", "killed", "late"]
"""The kinds of failures. "raised": the provider raised an error instead of building a kernel. "killed": the system
ended the kernel's process or its compiler, most likely because memory ran out. "late": it was not measured in time."""


AGAIN = ", nor in an earlier session"
"""The end of the message for a kernel that hung in two sessions."""


DISTURBED_SHARE = 0.02
"""A run is disturbed if one of its threads had no core for a larger fraction of its time."""

DISTURBED_NS = 1000
"""A shorter time without a core is normal, as when a thread wakes up."""

MOST_AWAY = 0.9
"""A run in which a thread had no core for a larger fraction of the time is dropped."""

CLEAN_SAMPLES = 3
"""If at least this number of runs, or half of all runs, are undisturbed, the disturbed ones are ignored."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured time.

    Attributes:
        time_ns: a low quantile of the samples; the median if `is_disturbed`.
        samples_ns: nanoseconds per run, in the order in which they were taken.
        is_confirmed: whether it was timed a second time, in another batch.
        disturbed: how many runs were disturbed: a thread had no core for a part of the run.
        is_disturbed: whether too few runs were undisturbed. Then the samples are the times of all runs, minus
            the time for which a thread had no core. That is an estimate, and is not stored for other searches.
        machine: the machine of a farm that measured it; "" for this one.
    """

    time_ns: int
    samples_ns: tuple[int, ...]
    is_confirmed: bool = False
    disturbed: int = 0
    is_disturbed: bool = False
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A kernel that can't be used, with the reason; its candidate is excluded."""

    kind: FailureKind
    message: str


Record = Measured | Failed


def is_lasting(record: Record) -> bool:
    """Return whether a record is also valid for later searches.

    A kernel that the system killed, or whose runs were disturbed, may be measured successfully later. An error of
    a provider is to be reported by later searches too.
    """
    if isinstance(record, Failed):
        return record.kind not in ("killed", "raised", "late")
    return not record.is_disturbed


def is_worth_retrying(record: Record) -> bool:
    """Return whether a record of another session says that a kernel hung, and only in one session.

    A busy machine may have been the cause. A kernel that hung in two sessions is not tried again.
    """
    return isinstance(record, Failed) and record.kind == "hung" and AGAIN not in record.message


def retried(record: Record) -> Record:
    """Return the record of a kernel that hung in another session, marked if it did so again."""
    if isinstance(record, Failed) and record.kind == "hung":
        return Failed("hung", f"{record.message}{AGAIN}")
    return record


def confirmed(first: Measured, again: Record) -> Record:
    """Return the combination of two measurements: the longer time, so that costs rise, except after a disturbance.

    If only one of them is undisturbed, that one is used.
    """
    if isinstance(again, Failed):
        return again if is_lasting(again) else replace(first, is_confirmed=True)
    best = max(first, again, key=lambda record: (not record.is_disturbed, record.time_ns))
    return replace(best, is_confirmed=True, disturbed=first.disturbed + again.disturbed)


def to_text(record: Record) -> str:
    """Return a record as one line of JSON."""
    if isinstance(record, Failed):
        return json.dumps({"kind": record.kind, "message": record.message})
    fields: dict[str, Any] = {
        "time_ns": record.time_ns,
        "samples_ns": record.samples_ns,
        "is_confirmed": record.is_confirmed,
        "disturbed": record.disturbed,
    }
    if record.is_disturbed:
        fields["is_disturbed"] = True
    if record.machine:
        fields["machine"] = record.machine
    return json.dumps(fields)


def from_text(text: str) -> Record:
    """Return the record that `to_text` gives as `text`.

    Raises:
        ValueError: the text is not a record.
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
            bool(data.get("is_disturbed", False)),
            str(data.get("machine", "")),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record: {text[:80]!r}") from error


def is_disturbed(sample_ns: int, away_ns: int) -> bool:
    """Return whether a run is disturbed: a thread had no core for a considerable part of it."""
    return away_ns > max(DISTURBED_NS, DISTURBED_SHARE * sample_ns)


def is_enough(clean: int, samples: int) -> bool:
    """Return whether enough of the samples are undisturbed to ignore the others."""
    return clean >= min(CLEAN_SAMPLES, max(1, samples / 2))


def summarize(samples_ns: Sequence[int], away_ns: Sequence[int] = ()) -> Measured:
    """Return the measurement for some samples: a low quantile, which other processes affect little.

    Args:
        samples_ns: the nanoseconds of each run.
        away_ns: for each run, how long one of its threads had no core; 0 for all if left out.
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

    # A thread's waiting time may not have delayed the others, and then too much is subtracted. So the median is used.
    time_ns = max(1, quantile(0.2 if is_clean else 0.5))
    return Measured(time_ns, tuple(used), disturbed=disturbed, is_disturbed=not is_clean)
