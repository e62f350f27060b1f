"""A provider that raises an error loses that group; the model is optimized with the others."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import korch
from korch.ablation import Ablation
from korch.candidate.candidate import Candidate, Group, Offer, Refusal, make_group
from korch.candidate.layout import Layout
from korch.candidate.shape import FUSED
from korch.measure.cpu import CpuMeter
from korch.measure.record import Failed, is_lasting
from korch.options import Options
from korch.primitive.graph import GraphBuilder
from korch.primitive.types import ValueType
from korch.provider import provider as providers
from korch.provider.generated import GeneratedProvider
from korch.ranges.served import Served
from korch.report.explain import faults, summary
from korch.search.instance import Answers, collect_candidates
from korch.target import Target
from tests.support.models import parsed

pytestmark = pytest.mark.fault

PLAIN = Layout.plain(2)


def negation() -> Group:
    graph = GraphBuilder()
    graph.output("y", graph.add("neg", [graph.input("x", ValueType.parse("f32[3,5]"))]))
    return make_group(graph.freeze(), [0], [1])


class Broken:
    """A provider whose `offer` or `build` gives a value or raises an error."""

    name, version = "broken", "1"

    def __init__(self, offers: Any = None, built: Any = None) -> None:
        self.offers, self.built = offers, built

    def offer(self, group: Group, target: Target) -> Any:
        return self._give([Offer((PLAIN,), (PLAIN,))] if self.offers is None else self.offers)

    def build(self, group: Group, offer: Offer, target: Target) -> Any:
        return self._give(self.built)

    def _give(self, value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value() if callable(value) else value


def lazily() -> Iterator[Offer]:
    yield Offer((PLAIN,), (PLAIN,))
    raise IndexError("late")


@pytest.mark.parametrize(
    ("offers", "text"),
    [
        (KeyError("axis"), "KeyError ('axis')"),
        (korch.errors.ModelError("no model"), "ModelError (no model)"),
        (RecursionError("deep"), "RecursionError (deep)"),
        (lazily, "IndexError (late)"),
        (3, "TypeError ('int' object is not iterable)"),
        (lambda: None, "TypeError ('NoneType' object is not iterable)"),
        ([3], "ProviderError (it offers 3; expected Offers or a Refusal)"),
        ([Offer((), (PLAIN,))], "ProviderError (an offer's layouts do not fit the group"),
        ([Offer((PLAIN,), (Layout.plain(3),))], "ProviderError (an offer's layouts do not fit the group"),
        ([Offer((PLAIN,), (PLAIN,), work_flop=-1)], "ProviderError (an offer has a negative number of operations"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_offer_is_a_refusal(offers: Any, text: str, caplog: pytest.LogCaptureFixture) -> None:
    group = negation()
    answers = Answers([Broken(offers), GeneratedProvider()], Target())
    candidates, refusals = collect_candidates(group.body, [group], answers)
    assert {c.provider for c in candidates} == {"generated"}
    assert any(reason.startswith(f"broken: it raised {text}") for reason in refusals)
    ((line, count),) = answers.faults.counts().items()
    assert line.startswith(f"provider 'broken': it raised {text}")
    assert line.endswith(" for neg on f32[3,5]") and count == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.fault  # type: ignore[attr-defined]  # what makes any other test fail


def test_an_error_is_logged_once_and_counted_for_each_group(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers([Broken(ValueError("no"))], Target())
    for shape in ("f32[2,3]", "f32[2,4]", "f32[2,4]"):  # the third equals the second
        graph = GraphBuilder()
        graph.output("y", graph.add("abs", [graph.input("x", ValueType.parse(shape))]))
        answers.ask(make_group(graph.freeze(), [0], [1]))
    assert list(answers.faults.counts().values()) == [2]
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1


def test_memory_that_runs_out_is_no_fault_of_the_group() -> None:
    with pytest.raises(MemoryError):
        Answers([Broken(MemoryError())], Target()).ask(negation())


def test_an_error_of_a_function_for_groups_loses_its_groups() -> None:
    group = negation()

    def compose(graph: object, groups: object) -> Iterator[Group]:
        yield group
        raise AssertionError("composed")

    provider = Broken()
    provider.group_shapes = (FUSED, compose)  # type: ignore[attr-defined]
    answers = Answers([provider], Target())
    shape, composed = answers.shapes()
    assert shape is FUSED and list(composed(group.body, [])) == [group]  # type: ignore[operator]
    ((line, _),) = answers.faults.counts().items()
    assert "AssertionError (composed)" in line and line.endswith("for groups of its own")


@pytest.mark.parametrize("built", [ZeroDivisionError("rows"), None], ids=["error", "none"])
def test_an_error_of_build_excludes_the_candidate_in_this_search_only(built: Any, cache_folder: Path) -> None:
    group = negation()
    candidate = Candidate(group, "broken", Offer((PLAIN,), (PLAIN,)))
    with CpuMeter(Options(threads=1, cache_folder=cache_folder), [Broken(built=built)]) as meter:
        assert isinstance(meter.kernel(candidate), Refusal)
        (record,) = meter.measure([candidate])
        assert isinstance(record, Failed) and record.kind == "raised" and not is_lasting(record)
        assert meter.database.record(candidate.key) is None
        assert list(meter.faults.counts().values()) == [1]


def test_an_error_in_leaving_out_what_a_size_needs_excludes_the_candidate(cache_folder: Path) -> None:
    group = negation()
    offer = Offer((PLAIN,), (PLAIN,))
    with CpuMeter(Options(threads=1, cache_folder=cache_folder), [Broken(built="kernel")]) as meter:
        served = Candidate(group, "broken", offer, served=Served((), {}, (1,)))  # not of this group
        assert isinstance(meter.kernel(served), Refusal)
        assert len(meter.faults.counts()) == 1


def test_a_model_is_optimized_although_a_provider_raises(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for provider in (Broken(IndexError("tuple index out of range")), Broken(built=IndexError("tuple index"))):
        with monkeypatch.context() as patch:
            patch.setattr(providers, "_registered", {providers.ENTRY_POINT_GROUP: [lambda provider=provider: provider]})
            model = parsed("(float[3,5] x) => (float[3,5] y) { y = Neg(x) }", 20)
            executable: Any = korch.optimize(
                model, measure=False, threads=1, cache_folder=cache_folder, ablation=Ablation(baselines=False)
            )
        x = np.arange(15, dtype=np.float32).reshape(3, 5)
        assert np.array_equal(executable(x)[0], -x)
        (line,) = faults(executable.report)
        if provider.built is None:
            assert line.startswith("a fault, please report it with the model: provider 'broken': it raised IndexError")
            assert line.endswith(" for neg on f32[3,5] (1 group)")
            assert line in summary("model", executable.report)
