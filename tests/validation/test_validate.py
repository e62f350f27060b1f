"""Plans are validated end to end: all at once, or two at a time if they are large."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from korch.numerics import Difference
from korch.system.deadline import Deadline
from korch.validation import timing
from korch.validation.plan import PlanEntry, Result
from korch.validation.timing import Until
from korch.validation.validate import HEAVY_BYTES, _validate_in_turn

TIMES_NS = {"slow": 3_000_000, "fast": 100_000, "wrong": 0, "middle": 1_000_000}


class Fake:
    """An executable that says to take a known time; it counts how many of its like are alive."""

    alive = 0
    most = 0
    away_ns = 0

    def __init__(self, name: str, weights_bytes: int) -> None:
        self.name = name
        self.plan = SimpleNamespace(weights_bytes=weights_bytes)
        Fake.alive += 1
        Fake.most = max(Fake.most, Fake.alive)

    def __del__(self) -> None:
        Fake.alive -= 1

    def stopwatch(self, arrays: object) -> Callable[[], int]:
        return lambda: TIMES_NS[self.name] + Fake.away_ns


def hold(names: tuple[str, ...], weights_bytes: int, until: Until | None = None) -> dict[str, Result]:
    Fake.alive = Fake.most = Fake.away_ns = 0

    def attempt(entry: PlanEntry) -> Result:
        if entry.name == "refused":
            return Result(entry, None, refusal="it is")
        executable: Any = Fake(entry.name, weights_bytes)
        refusal = "it is wrong" if entry.name == "wrong" else ""
        return Result(entry, executable, errors={"y": Difference()}, refusal=refusal)

    entries = [PlanEntry(name, (), ()) for name in names]
    return {result.entry.name: result for result in _validate_in_turn(entries, attempt, (), until or Until())}


@pytest.mark.parametrize("names", [("slow", "fast", "wrong", "middle", "refused"), ("wrong", "middle", "slow", "fast")])
def test_of_large_plans_two_are_in_memory_and_the_best_is_kept(names: tuple[str, ...]) -> None:
    results = hold(names, HEAVY_BYTES + 1)
    assert list(results) == list(names)
    assert Fake.most == 2
    kept = [name for name, result in results.items() if result.executable is not None]
    assert kept == ["fast"]
    assert all(result.times_ns for name, result in results.items() if name != "refused")


def test_small_plans_are_timed_together() -> None:
    results = hold(("slow", "fast", "middle"), 1)
    assert Fake.most == 3
    assert all(result.executable is not None for result in results.values())
    assert min(results.values(), key=lambda r: r.median_ns).entry.name == "fast"


def test_a_spent_budget_builds_the_first_plan_only() -> None:
    results = hold(("slow", "fast"), 1, Until(Deadline(0.0)))
    assert results["slow"].is_right and results["slow"].times_ns
    assert results["fast"].refusal == "the budget left no time to build it"
    first_is_wrong = hold(("wrong", "fast"), 1, Until(Deadline(0.0)))
    assert first_is_wrong["fast"].executable is not None


def test_disturbed_runs_are_dropped_and_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = iter(range(1000))

    class Disturbed:
        """Of the second plan, two runs of three lack a core for ten milliseconds."""

        def __init__(self) -> None:
            place = next(turn)
            Fake.away_ns = 10_000_000 if place % 2 and place % 6 != 1 else 0

        def away_ns(self) -> int:
            return Fake.away_ns

    monkeypatch.setattr(timing, "Absence", Disturbed)
    results = hold(("slow", "fast"), 1)
    assert (results["slow"].disturbed, results["fast"].disturbed) == (0, 66)
    assert results["fast"].median_ns == TIMES_NS["fast"] and not results["fast"].is_disturbed
    assert min(results.values(), key=lambda r: r.rank_ns).entry.name == "fast"
