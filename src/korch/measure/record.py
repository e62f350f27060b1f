"""What is known of a candidate's cost: a measured time, or why there is none.

"Slow", "crashed", "refused" and "not tried" are different facts and have different types.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

FailureKind = Literal[
    "refused", "not compiled", "not created", "failed", "crashed", "hung", "killed"
]  # fmt: skip
"""Killed: the system ended the kernel's process or its compiler, most likely for want of memory."""


AGAIN = ", nor in an earlier session"
"""The end of the message of a kernel that hung in two sessions."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured time.

    Attributes:
        time_ns: the low quantile of the samples.
        spread: (80 % quantile - 20 % quantile) / median of the samples.
        samples_ns: nanoseconds per run, in the order in which they were taken.
        is_confirmed: whether it was timed a second time, in another batch.
    """

    time_ns: int
    spread: float
    samples_ns: tuple[int, ...]
    is_confirmed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A kernel that can't be used, and why; its candidate is excluded."""

    kind: FailureKind
    message: str


Record = Measured | Failed


def is_lasting(record: Record) -> bool:
    """Return whether a record will be as true next time: what the system killed may then live."""
    return not (isinstance(record, Failed) and record.kind == "killed")


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
    """Return what two measurements say together: the longer time, so that costs only rise."""
    if isinstance(again, Failed):
        return again if is_lasting(again) else replace(first, is_confirmed=True)
    longer = max(first, again, key=lambda record: record.time_ns)
    return replace(longer, is_confirmed=True)


def to_text(record: Record) -> str:
    """Return a record as one line of JSON."""
    if isinstance(record, Failed):
        return json.dumps({"kind": record.kind, "message": record.message})
    return json.dumps({"time_ns": record.time_ns, "spread": record.spread,
                       "samples_ns": record.samples_ns,
                       "is_confirmed": record.is_confirmed})  # fmt: skip


def from_text(text: str) -> Record:
    """Return the record that `to_text` gives as `text`.

    Raises:
        ValueError: there is none.
    """
    try:
        data = json.loads(text)
        if "kind" in data:
            return Failed(data["kind"], str(data["message"]))
        return Measured(int(data["time_ns"]), float(data["spread"]), tuple(data["samples_ns"]),
                        bool(data.get("is_confirmed", False)))  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record: {text[:80]!r}") from error


def summarize(samples_ns: list[int]) -> Measured:
    """Return the measurement that samples give: a low quantile, robust to busy neighbours."""
    ordered = sorted(samples_ns)

    def quantile(share: float) -> int:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    middle = max(1, quantile(0.5))
    spread = (quantile(0.8) - quantile(0.2)) / middle
    return Measured(max(1, quantile(0.2)), round(spread, 4), tuple(samples_ns))
