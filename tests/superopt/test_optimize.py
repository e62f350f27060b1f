"""Models are optimized with found programs: these are kept, replayed, explained, and can be switched off."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import korch
from korch.errors import OptionError
from korch.limits import SearchLimits
from korch.report.explain import explain
from korch.report.kernel import kernel_text
from korch.runtime.report import Report
from korch.superopt import find
from korch.superopt.find import Finding, FoundProgram
from korch.superopt.provider import SuperoptProvider
from korch.superopt.sizes import CacheMachine
from korch.target import detect_target
from korch.tile.ir.stored import stored_program
from tests.superopt.superopt_programs import LORA
from tests.superopt.test_find import group_of
from tests.support.blocks import BLOCKS
from tests.support.facts import Facts
from tests.support.models import parsed
from tests.support.parse_tiles import parse_program


def lora() -> onnx.ModelProto:
    """Return x w + (x a) b."""
    text = """(float[3,48] x, float[48,32] w, float[48,2] a, float[2,32] b) => (float[3,32] y) {
        p = MatMul(x, w)
        q = MatMul(x, a)
        r = MatMul(q, b)
        y = Add(p, r)
    }"""
    return parsed(text, 18)


@pytest.mark.long
def test_programs_are_found_kept_and_replayed(tmp_path: Path, cache_folder: Path, monkeypatch) -> None:
    options = {"threads": 1, "search": SearchLimits(max_primitives=1), "cache_folder": cache_folder}
    ledger = tmp_path / "ledger"
    first = korch.optimize(lora(), superopt=60.0, ledger=ledger, **options)
    counts, pruned = first.report.provider_reports
    assert re.fullmatch(r"superoptimizer: [1-9]\d* programs for [1-9] of [1-9] groups, .* visited in .* s", counts)
    assert pruned.startswith("  pruned: ")
    found = {step.candidate for step in first.plan.steps if step.provider == "superopt"}
    assert found == first.report.described.keys()
    assert counts in explain(first.plan, first.report)

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is searched again")

    monkeypatch.setattr(find, "search", refuse)
    second = korch.optimize(lora(), **options)
    assert second.report.provider_reports[0] == counts
    options["cache_folder"] = tmp_path / "empty"
    again = korch.optimize(lora(), superopt=60.0, replay=ledger, **options)
    assert [s.candidate for s in again.plan.steps] == [s.candidate for s in first.plan.steps]
    given = {i.name: np.ones(i.shape, np.float32) for i in first.get_inputs()}
    np.testing.assert_array_equal(again.run(None, given)[0], first.run(None, given)[0])


def test_by_default_and_without_it_nothing_is_searched(tmp_path: Path, calibrated, monkeypatch) -> None:
    monkeypatch.setattr(find, "search", None)
    options = {"threads": 1, "search": SearchLimits(max_primitives=1), "cache_folder": calibrated(tmp_path)}
    for more in ({}, {"superopt": 0.0}, {"superopt": 60.0, "strict": True}, {"superopt": 60.0, "measure": False}):
        executable = korch.optimize(lora(), **options, **more)
        assert executable.report.provider_reports == ()
        assert not any(step.provider == "superopt" for step in executable.plan.steps)


def test_seconds_below_0_are_refused() -> None:
    with pytest.raises(OptionError, match="option superopt"):
        korch.optimize(lora(), superopt=-1.0)


def test_found_programs_are_explained() -> None:
    plan, report = korch.optimize(lora(), measure=False, threads=1).plan, Report()
    group, provider = group_of(BLOCKS["lora"]()), SuperoptProvider(Facts(), CacheMachine(4, 2, 1 << 16))
    stored = stored_program(parse_program(LORA))
    found = FoundProgram(stored, (), 1, ("before: e2 = contract(e0, e1) along a0",), 1500.0)
    provider.known[group.key] = Finding((found,))
    (offer,) = provider.offer(group, detect_target(1, ""))
    lines = provider.describe(group, offer)
    text = kernel_text(plan, replace(report, described={plan.steps[0].candidate: lines}), 0)
    assert "found by the superoptimizer (estimated 1.5 us)" in text
    assert "\n  before: e2 = contract(e0, e1) along a0\n" in text
    assert all(f"\n  {line}" in text for line in LORA.splitlines())
    assert "found by" not in kernel_text(plan, report, 0)
