"""Estimates are scaled by the measured times of similar kernels."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Offer
from korch.candidate.enumerate import enumerate_groups
from korch.limits import SearchLimits
from korch.measure.meter import SPREAD
from korch.measure.record import Measured
from korch.options import Options
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import ConcatAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import ValueType
from korch.provider.generated import GeneratedProvider
from korch.search.estimate import Experience, expected_improvement_ns, kinds
from korch.search.instance import Answers, collect_candidates
from korch.search.price import estimates_ns
from korch.target import Target


def improvement_ns(estimate_ns: float, slack_ns: float) -> float:
    return expected_improvement_ns(estimate_ns, slack_ns, SPREAD)


def candidates() -> dict[str, Candidate]:
    """Candidates of one primitive each, by its operation and its shape."""
    builder = GraphBuilder()
    for size in (4, 8):
        x = builder.input(f"x{size}", ValueType.parse(f"f32[{size},16]"))
        for op in ("neg", "abs", "exp", "erf"):
            builder.output(f"{op}{size}", builder.add(op, [x]))
        moved = builder.add("transpose", [x], TransposeAttributes((1, 0)))
        builder.output(f"transpose{size}", moved)
    graph = builder.freeze()
    groups, _ = enumerate_groups(graph, Options(search=SearchLimits(max_primitives=1)))
    found, _ = collect_candidates(graph, groups, Answers([GeneratedProvider()], Target()))
    return {
        f"{c.group.body.primitives[0].op}{c.group.input_types[0].shape[0]}": c
        for c in found
        if len(c.group.primitives) == 1
    }


def test_what_is_alike_shares_the_finest_kind() -> None:
    found = candidates()
    assert kinds(found["neg4"]) == kinds(found["abs8"])
    assert kinds(found["exp4"]) == kinds(found["erf8"]) != kinds(found["neg4"])
    assert kinds(found["transpose4"])[0] != kinds(found["neg4"])[0]
    assert len({kinds(found[name])[-1] for name in ("neg4", "exp4", "transpose4")}) == 1


def test_what_turns_images_or_joins_parts_is_another_kind() -> None:
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[1,16,16,16]"))
    y = builder.add("neg", [x])
    builder.output("y", y)
    builder.output("z", builder.add("concat", [x, x], ConcatAttributes(1)))
    graph = builder.freeze()
    groups, _ = enumerate_groups(graph, Options(search=SearchLimits(max_primitives=1)))
    found, _ = collect_candidates(graph, groups, Answers([GeneratedProvider()], Target()))
    second = {
        (c.group.body.primitives[0].op, *map(str, (*c.offer.inputs, *c.offer.outputs))): kinds(c)[1]
        for c in found
        if c.group.primitives
    }
    along = {second["neg", layout, layout] for layout in ("abcd", "acdb", "aBcd16b")}
    turned = {second["neg", "abcd", "acdb"], second["neg", "acdb", "abcd"]}
    assert len(along) == len(turned) == 1
    assert along != turned
    assert second["concat", "abcd", "abcd"] not in along


def test_each_finer_kind_moves_the_factor_towards_its_median() -> None:
    found, experience = candidates(), Experience()
    assert experience.estimate_ns(found["neg4"], 100, experience.factors()) == 100
    for name, time_ns in (("neg4", 200), ("abs4", 800), ("exp4", 900)):
        experience.learn(found[name], time_ns, 100)
        experience.learn(found[name], 10 * time_ns, 100)  # a second time counts for nothing
    factors = experience.factors()

    def expected_ns(*levels: tuple[float, int]) -> float:
        log = 0.0
        for ratio, count in levels:
            log += count / (count + 1) * (np.log(ratio) - log)
        return float(1000 * np.exp(log))

    # All kernels are of the three coarsest kinds; the two finest ones separate functions such as exp from others.
    everything = ((8, 3),) * 3
    assert experience.estimate_ns(found["neg8"], 1000, factors) == int(expected_ns(*everything, (4, 2), (4, 2)))
    assert experience.estimate_ns(found["erf8"], 1000, factors) == int(expected_ns(*everything, (9, 1), (9, 1)))
    assert experience.estimate_ns(found["transpose8"], 1000, factors) == int(expected_ns(*everything))
    experience.learn(found["erf4"], 0, 100)  # shorter than the clock's step
    assert experience.estimate_ns(found["erf8"], 1000, experience.factors()) > 0


@pytest.mark.parametrize(("is_disturbed", "expected_ns"), [(False, 2000), (True, 100)])
def test_a_disturbed_time_says_nothing_of_other_kernels(is_disturbed: bool, expected_ns: int) -> None:
    found = candidates()
    own = [found["neg4"], found["neg8"]]
    ledger: Any = SimpleNamespace(
        records={found["neg4"].key: Measured(3000, (3000,), is_disturbed=is_disturbed)},
        bounds_ns=lambda candidates: [50 for _ in candidates],
        guesses_ns=lambda candidates: [100 for _ in candidates],
        experience=Experience(),
    )
    found_ns = estimates_ns(ledger, own)
    assert found_ns[0] == 3000
    assert (found_ns[1] > expected_ns) is not is_disturbed


def test_convolutions_channel_by_channel_are_another_kind() -> None:
    found = {}
    for groups in (1, 4):
        builder = GraphBuilder()
        x = builder.input("x", ValueType.parse("f32[1,4,8,8]"))
        weights = builder.constant(np.ones((4, 4 // groups, 1, 1), np.float32))
        one = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1), groups)
        builder.output("y", builder.add("conv", [x, weights], one))
        graph = builder.freeze()
        (group,) = enumerate_groups(graph, Options())[0]
        plain = Offer(*group.plain_layouts)
        found[groups] = kinds(Candidate(group, "someone", plain, "1"))
    assert found[1][3] != found[4][3]
    assert found[1][4] == found[4][4]


def test_the_improvement_is_largest_for_what_is_likely_in_the_best_plan() -> None:
    assert (
        improvement_ns(1000, 0) > improvement_ns(1000, 100) > improvement_ns(1000, 500) > improvement_ns(1000, 900) >= 0
    )
    assert improvement_ns(2000, 0) == pytest.approx(2 * improvement_ns(1000, 0))
    assert improvement_ns(1000, 1000) == improvement_ns(1000, 5000) == 0  # no time is below 0


def test_the_improvement_is_the_mean_of_what_is_gained() -> None:
    times = 1000 * np.exp(SPREAD * np.random.default_rng(0).standard_normal(1 << 18))
    for slack in (0, 200, 500):
        gained = np.maximum(0, 1000 - slack - times).mean()
        assert improvement_ns(1000, slack) == pytest.approx(gained, rel=0.05)
