"""Times of kernels at some sizes predict which kernels are too slow at another size."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from korch.candidate.candidate import Candidate
from korch.candidate.enumerate import enumerate_groups
from korch.limits import DEFAULT_LIMITS, SearchLimits
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.pipeline.predicted import PREDICTED_ERROR, Predicted, at_sizes, predict, without_losers
from korch.primitive.graph import GraphBuilder
from korch.primitive.types import ValueType
from korch.provider.generated import GeneratedProvider
from korch.ranges.form import extent
from korch.ranges.served import Served
from korch.search.instance import Answers, collect_candidates
from korch.search.price import estimate_ns
from korch.target import Target

SEEN = ((65,), (1,))


def kernels(*variants: str) -> list[Candidate]:
    """Return kernels of one group at size 17."""
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[128,16]"))
    builder.output("y", builder.add("neg", [x]))
    graph = builder.freeze()
    groups, _ = enumerate_groups(graph, Options(search=SearchLimits(max_primitives=1)))
    found, _ = collect_candidates(graph, groups, Answers([GeneratedProvider()], Target()))
    first = next(c for c in found if c.group.primitives)
    served = Served(({0: frozenset((extent(0),))},), (17,))
    return [replace(first, offer=replace(first.offer, variant=name), served=served) for name in variants]


def ledger(*times: tuple[int, Candidate, int]) -> Any:
    """Return what a ledger knows after some times were measured."""
    records = {at_sizes(c, (n,)).key: Measured(time_ns, (time_ns,)) for n, c, time_ns in times}

    def cost_ns(candidate: Candidate) -> tuple[int, bool]:
        record = records.get(candidate.key)
        return (record.time_ns, True) if record is not None else (1, False)

    return SimpleNamespace(records=records, cost_ns=cost_ns, limits=DEFAULT_LIMITS)


def test_a_kernel_that_loses_at_all_other_sizes_is_left_out() -> None:
    best, near, slow, new = kernels("best", "near", "slow", "new")
    known = ledger(
        (65, best, 650), (1, best, 10), (17, best, 176),  # where 170 are expected
        (65, near, 640), (1, near, 12), (65, slow, 1300), (1, slow, 20), (65, new, 5000),
    )  # fmt: skip
    predicted = predict([best, near, slow, new], (17,), SEEN, known)
    assert predicted.error == pytest.approx(6 / 176, abs=1e-3)
    assert predicted.times_ns == {near.key: 169, slow.key: 340}
    assert without_losers([best, near, slow, new], predicted, known) == (best, near, new)


def test_predictions_alone_compare_with_their_error() -> None:
    near, slow = kernels("near", "slow")
    known = ledger()
    assert without_losers([near, slow], Predicted({near.key: 100, slow.key: 130}, 0.1), known) == (near, slow)
    assert without_losers([near, slow], Predicted({near.key: 100, slow.key: 170}, 0.1), known) == (near,)
    assert without_losers([near, slow], Predicted({near.key: 100, slow.key: 999}, None), known) == (near, slow)


def test_without_samples_nothing_is_predicted() -> None:
    (one,) = kernels("one")
    assert predict([one], (17,), SEEN, ledger((65, one, 100))) == Predicted({}, None)
    known = ledger((65, one, 100), (1, one, 100), (17, one, 100))
    assert predict([one], (17,), SEEN, known) == Predicted({}, PREDICTED_ERROR)
    known.records[at_sizes(one, (1,)).key] = Failed("crashed", "")
    assert predict([one], (17,), SEEN, known) == Predicted({}, None)
    plain = replace(one, served=None)
    assert at_sizes(plain, (1,)) is plain and predict([plain], (17,), SEEN, known).times_ns == {}


def test_a_prediction_is_the_estimate() -> None:
    (one,) = kernels("one")
    known = ledger()
    known.predicted_ns, known.guesses_ns = {one.key: 170}, lambda found: [50 for _ in found]
    known.experience = SimpleNamespace(factors=dict, estimate_ns=lambda candidate, guess_ns, factors: guess_ns)
    assert estimate_ns(known, one) == 170
    known.predicted_ns = {}
    assert estimate_ns(known, one) == 50
