"""A search that is replayed from its ledger finds the same plan and measures nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import korch
from benchmarks.models import build
from korch.candidate.candidate import Candidate
from korch.equivalence.saturate import saturate
from korch.errors import OptionError, ReplayError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.limits import SearchLimits
from korch.measure.cpu import CpuMeter
from korch.options import Options
from korch.pipeline import optimize, untold
from korch.pipeline.results import StageResults
from korch.pipeline.run import Run
from korch.pipeline.stages import PipelineStage
from korch.search.ledger import Ledger
from korch.segments.block import find_blocks
from korch.segments.block_task import prepare_all
from korch.segments.join import join
from korch.segments.search import Segmented, search_segments
from korch.segments.with_alternatives import split_segments
from korch.system.deadline import Deadline
from tests.partition_oracle import FakeMeter

OPTIONS = Options(threads=1, search=SearchLimits(max_primitives=4, solver_seconds=5.0, solver_workers=1))


class Silent(FakeMeter):
    """Has the target and the providers, and no answer but bounds."""

    def measure(self, *arguments: Any) -> Any:
        raise AssertionError("a replay measures nothing")

    known = confirm = predict = compile_s = measure  # type: ignore[assignment]


def plan(ledger: Ledger, deadline: Deadline | None = None) -> list[str]:
    graph = fission(load_model(build("conv_bn_relu")))
    partition = find_blocks(graph, split_segments(graph, 8), lambda g: saturate(g, strict=False))
    joined = join(partition)
    tasks = prepare_all(partition, joined, ledger.meter, OPTIONS)
    outcome = search_segments(Segmented(partition, joined, tasks), ledger, OPTIONS, deadline or Deadline())
    return [step.key for step in outcome.plans["searched"]]


@pytest.mark.parametrize("deadline", [Deadline(), Deadline(0.0)])
def test_a_search_in_segments_is_replayed(tmp_path: Path, deadline: Deadline) -> None:
    path = tmp_path / "search.ledger"
    steps = plan(Ledger(FakeMeter(), OPTIONS.search, write_to=path), deadline)
    assert plan(Ledger(Silent(), OPTIONS.search, replay=path)) == steps


def test_a_ledger_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.ledger"
    plan(Ledger(FakeMeter(), OPTIONS.search, write_to=path, about={"target": "a"}))
    with pytest.raises(ReplayError, match="the ledger is of a search with target 'a'; here it is 'b'"):
        Ledger(Silent(), OPTIONS.search, replay=path, about={"target": "b"})
    lines = path.read_text("utf-8").splitlines()
    kind, _, *rest = json.loads(lines[4])
    path.write_text("\n".join([*lines[:4], json.dumps([kind, "another", *rest]), *lines[5:]]))
    with pytest.raises(ReplayError, match=f"line 5: the search asks for {kind} .*, but the ledger has {kind} another"):
        plan(Ledger(Silent(), OPTIONS.search, replay=path, about={"target": "a"}))
    path.write_text("\n".join(lines[:4]))
    with pytest.raises(ReplayError, match="the ledger has nothing next"):
        plan(Ledger(Silent(), OPTIONS.search, replay=path, about={"target": "a"}))
    path.write_text("not JSON")
    with pytest.raises(ReplayError, match="line 1: 'not JSON' is not an entry of a ledger"):
        Ledger(Silent(), OPTIONS.search, replay=path)


def test_a_ledger_that_can_not_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the ledger can't be opened: No such file or directory"):
        Ledger(Silent(), replay=tmp_path / "none")
    with pytest.raises(OptionError, match=r"the ledger can't be opened"):
        Ledger(Silent(), write_to=tmp_path / "none" / "search.ledger")
    with pytest.raises(OptionError, match="a replay writes no ledger"):
        Options(ledger=tmp_path / "a", replay=tmp_path / "a")


def test_each_of_several_searches_has_a_ledger_of_its_own() -> None:
    options = Options(ledger=Path("a/search.ledger"))
    assert [options.for_search(n).ledger for n in (0, 2)] == [Path("a/search.ledger"), Path("a/search.ledger.2")]
    assert Options().for_search(2).ledger is None
    own = [options.for_search(i, "isa").for_search(j).ledger for i in range(3) for j in range(3)]
    assert len(set(own)) == 9 and own[0] == options.ledger


def test_a_model_is_optimized_again_from_the_ledger(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = build("mlp"), tmp_path / "search.ledger"
    options = {"threads": 1, "search": SearchLimits(max_primitives=4), "cache_folder": cache_folder}
    first = korch.optimize(model, ledger=path, **options)

    def refuse(self: CpuMeter, candidates: list[Candidate], *rest: Any) -> None:
        raise AssertionError("a replay measures nothing")

    for name in ("measure", "confirm"):
        monkeypatch.setattr(CpuMeter, name, refuse)
    again = korch.optimize(model, replay=path, **options)
    assert [s.candidate for s in again.plan.steps] == [s.candidate for s in first.plan.steps]
    assert again.report.predicted_ms == first.report.predicted_ms
    given = {i.name: np.ones(i.shape, np.float32) for i in first.get_inputs()}
    for expected, found in zip(first.run(None, given), again.run(None, given), strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ReplayError, match=r"the ledger is of a search with option gap 0\.005; here it is 0\.5"):
        korch.optimize(model, replay=path, **{**options, "search": SearchLimits(gap=0.5, max_primitives=4)})


@pytest.mark.parametrize("wrong", ["null", "3", '{"a": 1}', "[1, 2]", '[["begin"]'])
def test_a_line_that_is_no_entry_is_named(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text(wrong + "\n")
    with pytest.raises(ReplayError, match=r"line 1: .* is not an entry of a ledger"):
        Ledger(Silent(), OPTIONS.search, replay=path)


def test_an_answer_of_another_type_is_a_damaged_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Run, results: StageResults) -> StageResults:
        raise TypeError("'<' not supported between instances of 'str' and 'float'")

    monkeypatch.setattr(optimize, "STAGES", (PipelineStage("frontend", fails, lambda results: ""),))
    run = Run(replace(OPTIONS, replay=Path("a.ledger")), {}, untold)
    with pytest.raises(ReplayError, match=r"^a\.ledger: an answer of the ledger can't be used"):
        optimize.run_until(run, "frontend")
    with pytest.raises(TypeError, match="not supported"):
        optimize.run_until(Run(OPTIONS, {}, untold), "frontend")
