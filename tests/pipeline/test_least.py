"""The least budget, estimated before a search."""

import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from korch.errors import InaccurateError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.options import Options
from korch.pipeline import Run, untold
from korch.pipeline.least import CALIBRATION_S, Least, least_of, work_of
from korch.pipeline.optimize import optimize_run
from korch.pipeline.results import Built
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.reference import body_of
from korch.primitive.types import DType, ValueType
from korch.runtime.report import Report
from korch.system.deadline import Deadline
from tests.support.loops import loop_model

LEAST = Least(search_s=4.0, compile_s=3.0, end_s=2.0)


def run(budget_s: float, given: Deadline | None = None) -> Run:
    return Run(Options(budget_s=budget_s), {}, untold, given=given)


def chain(kinds: int, repeats: int) -> PrimitiveGraph:
    builder = GraphBuilder()
    value = builder.input("x", ValueType((4, 4), DType.F32))
    for _ in range(repeats):
        for op in ("exp", "tanh", "neg", "abs")[:kinds]:
            value = builder.add(op, [value])
    builder.output("y", value)
    return builder.freeze()


def test_a_budget_that_is_too_short_is_announced_with_one_that_suffices(caplog: pytest.LogCaptureFixture) -> None:
    short = run(5.0)
    short.expect(LEAST)
    assert short.least_s == 10.0  # the least is rounded up
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the budget of 5 s is too short: the least is about 10 s (0 until now" in caplog.text
    caplog.clear()
    follows = run(short.least_s)
    follows.expect(LEAST)
    assert follows.least_s is None and not caplog.records
    assert short.end_s == follows.end_s == 2.0


def test_the_least_of_several_plans_counts_all_of_them() -> None:
    now_s = time.monotonic()
    first = run(20.0, Deadline.after(20.0, now_s).shared(3))
    first.expect(LEAST)
    assert first.least_s == 28.0
    enough = run(28.0, Deadline.after(28.0, now_s).shared(3))
    enough.expect(LEAST)
    assert enough.least_s is None


def test_the_least_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    own = run(5.0)
    for least in (LEAST, Least(100.0, 3.0, 2.0)):
        own.expect(least)
    assert own.least_s == 10.0 and len(caplog.records) == 1
    enough = run(20.0)
    for least in (LEAST, Least(100.0, 3.0, 2.0)):
        enough.expect(least)
    assert enough.least_s is None and len(caplog.records) == 1


def test_a_repeated_search_is_not_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def search(own: Run, watch: object) -> None:
        seen.append(own.options)
        raise InaccurateError(f"search {len(seen)}")

    monkeypatch.setattr("korch.pipeline.optimize._run_all", search)
    with pytest.raises(InaccurateError, match="search 2"):
        optimize_run(Run(Options(precision="int8"), {}, untold), None)
    assert [(own.strict, own.precision) for own in seen] == [(False, "int8"), (True, "float32")]


def test_a_repeated_search_ends_with_the_budget_or_announces_its_least(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = run(10.0, Deadline.after(10.0, time.monotonic() - 2))
    seen: list[Run] = []

    def search(own: Run, watch: object) -> None:
        own.expect(LEAST if own is first else Least(20.0, 3.0, 2.0))
        seen.append(own)
        if own is first:
            raise InaccurateError("the error is 1")
        own.results["build"] = Built(SimpleNamespace(report=Report()), [])  # type: ignore[arg-type]

    monkeypatch.setattr("korch.pipeline.optimize._run_all", search)
    again = optimize_run(first, None)
    assert seen == [first, again] and again.options.strict
    assert again.deadline.at_s == first.deadline.at_s
    assert again.least_s == 28.0  # 25 s from now, after 2
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "the budget of 10 s is too short: the least is about 12 s",
        "no plan is within the tolerance, so the search is repeated; with --strict it is done once",
        "the budget of 10 s is too short: the least is about 28 s",
    ]


def test_a_compiler_that_hangs_is_given_up_at_the_end_of_the_budget_though_more_was_announced() -> None:
    begun_s = time.monotonic()
    short, enough = run(5.0, Deadline(begun_s + 5.0)), run(30.0, Deadline(begun_s + 30.0))
    for own, budget_s in ((short, 5.0), (enough, 30.0)):
        own.expect(LEAST)
        assert budget_s < (own.last_deadline.at_s or 0.0) - begun_s <= 1.1 * budget_s + 0.1


def test_more_kinds_of_primitives_and_an_empty_cache_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("korch.pipeline.least.slowness", lambda: 1.0)
    options = Options(cache_folder=tmp_path)
    few, many, long = (least_of(work_of(graph), options) for graph in (chain(1, 1), chain(4, 1), chain(4, 100)))
    assert few.compile_s < many.compile_s == long.compile_s  # equal kernels are compiled once
    assert many.end_s < long.end_s
    assert CALIBRATION_S < few.search_s < long.search_s  # the machine is not calibrated
    assert least_of(work_of(chain(1, 1)), options, compared=(1.0, 0.5)).end_s > few.end_s
    monkeypatch.setattr("korch.pipeline.least.slowness", lambda: 2.0)
    assert least_of(work_of(chain(1, 1)), options).total_s == pytest.approx(2 * few.total_s)


def test_the_interpreter_runs_all_iterations_of_a_loop_once_for_all_outputs() -> None:
    graph = fission(load_model(loop_model("several")))
    loops = [p.attributes for p in graph.primitives if isinstance(p.attributes, LoopAttributes)]
    (size,) = {len(body_of(loop.body).primitives) for loop in loops}
    assert len(loops) == 3 and work_of(graph).repeated == 40 * size
    assert work_of(fission(load_model(loop_model("nested")))).repeated > 40 * 40
