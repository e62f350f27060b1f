"""Calibrated bounds: the margin is a rank of the scores, and covers as many new kernels as it says."""

import math

import numpy as np
import pytest

from korch.costs.calibrated import LEVEL, ScoreTail, bound_ns, score


def test_the_margin_is_the_conformal_rank_of_the_scores() -> None:
    scores = list(map(float, range(1, 2001)))
    assert ScoreTail.of(scores).margin() == math.ceil(2001 * LEVEL) == 2000
    assert ScoreTail.of(scores[:1427]).margin() == math.inf  # of so few, none is known to be among the largest
    assert ScoreTail.of(scores[:1428]).margin() == 1428


def test_scores_of_other_kernels_count_as_if_they_were_records() -> None:
    scores = np.random.default_rng(0).standard_normal(3000).tolist()
    tail = ScoreTail.of(scores[:2000])
    assert len(tail.largest) < 12
    assert tail.margin(scores[2000:]) == ScoreTail.of(scores).margin()
    assert tail.margin([9.0] * 20_000) == 9.0
    assert tail.margin([-9.0] * 20_000) >= ScoreTail.of([*scores[:2000], *([-9.0] * 20_000)]).margin()


@pytest.mark.parametrize("tails", ["light", "heavy"])
def test_new_kernels_are_covered_as_often_as_promised(tails: str) -> None:
    rng = np.random.default_rng(1)

    def draw(count: int) -> list[float]:
        found = rng.standard_normal(count) if tails == "light" else rng.standard_t(2, count)
        return [float(x) for x in found]

    shares = [np.mean(np.array(draw(2000)) <= ScoreTail.of(draw(5000)).margin()) for _ in range(20)]
    assert LEVEL - 0.0005 <= np.mean(shares) < 1


def test_a_bound_is_what_a_kernel_of_this_score_takes() -> None:
    found = score(2000.0, 1000.0, 0.3)
    assert bound_ns(2000.0, 0.3, found) == pytest.approx(1000, abs=1)
    assert bound_ns(2000.0, 0.3, math.inf) == 0
    assert score(500.0, 1000.0, 0.3) < 0 < found
