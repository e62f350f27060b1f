"""Wrong predictions: kernels that may explain them are timed again, and a remaining discrepancy is reported."""

from types import SimpleNamespace
from typing import Any

from korch.system.deadline import Deadline
from korch.validation.discrepancy import examine, explaining
from korch.validation.plan import PlanEntry, Result


def test_those_explain_it_whose_times_differ_most() -> None:
    assert explaining([1, 8_000, 10, 16_000], [1, 20, 12, 30]) == [3, 1]
    assert explaining([5, 5], [5, 5]) == []
    assert explaining([9_000, 5, 10], [100, 3_000, 10]) == [0]  # all in all it takes less


class Meter:
    """Kernels take what they take in runs when they are timed again, but for those that don't."""

    def __init__(self, costs_ns: dict[str, int], again_ns: dict[str, int]) -> None:
        self.costs_ns, self.again_ns = costs_ns, again_ns
        self.again: list[str] = []

    def tell(self, text: str) -> None:
        pass

    def measure_again(self, candidates: Any, end: object) -> None:
        self.again += [c.key for c in candidates]
        self.costs_ns |= {c.key: self.again_ns[c.key] for c in candidates}

    def cost_ns(self, candidate: Any) -> tuple[int, bool]:
        return self.costs_ns[candidate.key], True


def validation(costs_ns: dict[str, int], in_run_ns: list[int], unknown: str = "") -> Any:
    steps: Any = tuple(SimpleNamespace(key=key, provider="toy") for key in costs_ns)
    entry = PlanEntry("optimal", steps, tuple((ns, key not in unknown) for key, ns in costs_ns.items()))
    timing = SimpleNamespace(kernel_ns=(in_run_ns,))
    winner = SimpleNamespace(time=lambda arrays, runs: timing)
    won = Result(entry, None, times_ns=(sum(in_run_ns),))
    return SimpleNamespace(winner=winner, won=won, arrays=(), timed=())


WRONG = {"a": 1_000_000, "b": 16_000_000, "c": 8_000_000}
RIGHT = {"a": 1_000_000, "b": 900_000, "c": 800_000}


def test_kernels_that_were_timed_wrongly_are_timed_again() -> None:
    meter: Any = Meter(dict(WRONG), RIGHT)
    doubt = examine(validation(WRONG, list(RIGHT.values())), meter, Deadline())
    assert doubt is not None and not doubt.remains
    assert meter.again == ["b", "c"]
    assert doubt.again_ns == sum(RIGHT.values())
    assert "optimize again" in doubt.to_text()


def test_what_stays_is_a_warning_that_names_the_kernels() -> None:
    meter: Any = Meter(dict(WRONG), WRONG)
    doubt = examine(validation(WRONG, list(RIGHT.values())), meter, Deadline())
    assert doubt is not None and doubt.remains
    text = doubt.to_text()
    assert "predicted to take 25 ms together, and runs take 2.7 ms" in text
    assert "most of it is in: kernel 1 (toy): 16 ms alone, 16 ms when timed again" in text
    late: Any = Meter(dict(WRONG), RIGHT)
    unexplained = examine(validation(WRONG, list(RIGHT.values())), late, Deadline(0.0))
    assert unexplained is not None and not late.again
    assert unexplained.to_text().endswith("there was no time to see which explain it")


def test_a_prediction_that_holds_is_not_doubted() -> None:
    meter: Any = Meter(dict(RIGHT), RIGHT)
    assert examine(validation(RIGHT, [1_200_000, 1_100_000, 900_000]), meter, Deadline()) is None
    small = {"a": 1000}  # most of such a run is the call
    assert examine(validation(small, [50_000]), meter, Deadline()) is None


def test_of_a_plan_with_unmeasured_kernels_the_others_are_compared() -> None:
    meter: Any = Meter(dict(WRONG), WRONG)
    doubt = examine(validation(WRONG, list(RIGHT.values()), unknown="c"), meter, Deadline())
    assert doubt is not None and doubt.remains and doubt.unknown == 1
    assert meter.again == ["b"]
    assert doubt.to_text().startswith(
        "the measured kernels, all but 1, were predicted to take 17 ms together, and take 1.9 ms in runs"
    )
    assert examine(validation(WRONG, list(RIGHT.values()), unknown="abc"), meter, Deadline()) is None
    assert examine(validation(WRONG, [WRONG["a"], WRONG["b"], 1], unknown="c"), meter, Deadline()) is None
