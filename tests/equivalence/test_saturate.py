"""Saturation only adds alternatives, is deterministic, and respects and reports its limits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from korch.equivalence.rule import Rule, RuleRefusal, View, Writer
from korch.equivalence.rules import RULES
from korch.equivalence.saturate import SaturationLimits, saturate, without_circular
from korch.errors import OptionError
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.ops.layout import ReshapeAttributes
from korch.primitive.text import format_graph, parse_graph
from korch.report.explain import faults
from korch.runtime.report import Report
from korch.system.deadline import Deadline
from tests.equivalence.equivalence_examples import FIRING, after, conv, divide, unary
from tests.equivalence.equivalence_oracle import apply_rules, assert_alternatives_agree

ROWS = conv("1,3,6,5", "2,3,3,2", "1,2,4,4")


def grow(shape_of: str = "same") -> Rule[Primitive]:
    """Return a rule that never ends: exp(x) = exp(x + 1)."""

    def match(view: View, root: Primitive) -> Iterator[Primitive]:
        yield root

    def write(writer: Writer, root: Primitive) -> int:
        if shape_of == "other":
            return writer.add("reshape", root.inputs, ReshapeAttributes((6,)))
        type_ = writer.type(root.output)
        one = writer.along(np.ones(()), 0, type_)
        return writer.add("exp", (writer.add("add", (root.inputs[0], one)),))

    return Rule("exp-grows", "false", "this test", ("exp",), match, lambda _, root: partial(write, root=root))


EXP = unary("f64[2,3]", "f64[2,3] = exp(%0)")


@pytest.mark.parametrize("text", [text for _, text in FIRING])
def test_every_primitive_that_can_be_used_is_kept(text: str) -> None:
    graph = parse_graph(text)
    result, _ = apply_rules(graph, RULES)
    kept = {(p.op, p.attributes, result.types[p.output]) for p in result.primitives}
    inputs = {value for _, value in result.outputs} & {value for _, value in result.inputs}
    last = graph.primitives[-1]
    assert inputs or (last.op, last.attributes, graph.types[last.output]) in kept


def test_two_runs_give_the_same_text() -> None:
    graph = parse_graph(ROWS)
    first, second = (format_graph(saturate(graph, strict=False)[0]) for _ in range(2))
    assert first == second
    assert format_graph(parse_graph(first)) == first


def test_a_saturated_graph_stays_as_it_is() -> None:
    once, _ = saturate(parse_graph(ROWS), strict=False)
    again, report = saturate(once, strict=False)
    assert sum(rule.fired for rule in report.rules) == 0
    assert format_graph(again) == format_graph(once)


def test_added_primitives_name_their_rule() -> None:
    result, _ = saturate(parse_graph(ROWS), strict=False)
    origins = {origin for origin in result.origins if origin}
    assert origins == {"by few-channel-conv-is-row-conv"}


def test_strict_leaves_out_what_reorders() -> None:
    graph = parse_graph(ROWS)
    result, report = saturate(graph, strict=True)
    assert result.alternatives == 0
    off = {rule.name for rule in report.rules if rule.is_off}
    assert off == {rule.name for rule in RULES if rule.reorders}
    assert "few-channel-conv-is-row-conv: off, it reorders" in str(report).splitlines()


def test_strict_keeps_exact_divisions() -> None:
    result, _ = saturate(parse_graph(divide("uniform=4.0")), strict=True)
    assert [p.op for p in result.primitives] == ["div", "mul"]
    result, _ = saturate(parse_graph(divide("uniform=3.0")), strict=True)
    assert [p.op for p in result.primitives] == ["div"]


@pytest.mark.parametrize(
    ("limits", "stopped"),
    [
        (SaturationLimits(iterations=3), "iterations"),
        (SaturationLimits(values=20), "values"),
        (SaturationLimits(seconds=1e-9), "seconds"),
    ],
)
def test_limits_end_a_growth_without_end(limits: SaturationLimits, stopped: str) -> None:
    result, report = saturate(parse_graph(EXP), strict=False, limits=limits, rules=[grow()])
    assert report.stopped == stopped
    assert str(report).splitlines()[0].endswith(f"stopped by the limit of {stopped}")
    assert len(result.primitives) > 1
    if stopped == "iterations":
        assert report.iterations == 3
    if stopped == "values":
        assert len(result.types) <= 24


@pytest.mark.parametrize("name", ["iterations", "values", "seconds"])
def test_a_limit_that_is_not_positive_is_refused(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        SaturationLimits(**{name: 0})
    assert str(caught.value) == (f"limit {name} of saturation: the value 0 is not positive; expected more than 0")


def failing(stage: str) -> Rule[Primitive]:
    """Return a rule that raises an error in one of its functions, or whose result has another type."""
    rule = grow("other" if stage == "merge" else "same")

    def fail(*_: object) -> Primitive:
        raise IndexError("no such axis")

    if stage == "write":
        return replace(rule, rewrite=lambda view, root: fail)
    return rule if stage == "merge" else replace(rule, **{stage: fail})


@pytest.mark.fault
@pytest.mark.parametrize("stage", ["match", "rewrite", "write", "merge"])
def test_a_rule_that_fails_is_dropped_there_and_reported(stage: str, caplog) -> None:
    graph = parse_graph(EXP)
    result, report = saturate(graph, strict=False, rules=[failing(stage)])
    assert [p.op for p in result.primitives] == ["exp"]
    (text,) = report.rules[0].failures
    assert text.startswith("at exp: InvalidGraphError" if stage == "merge" else "at exp: IndexErr")
    assert f"exp-grows: 0 fired; failed, which is a fault of Korch: {text}" in str(report)
    assert f"the rule exp-grows failed {text}; it is not applied there" in caplog.messages
    assert faults(Report(rules=report)) == [f"a fault, please report it with the model: rule exp-grows failed {text}"]


def test_a_deadline_ends_saturation() -> None:
    result, report = saturate(parse_graph(EXP), strict=False, rules=[grow()], deadline=Deadline(0))
    assert (report.stopped, report.iterations) == ("seconds", 1)
    assert "exp" in {p.op for p in result.primitives}


def test_refusals_are_counted_by_reason_and_name_the_value() -> None:
    graph = parse_graph(after("uniform=3.0", "add"))
    _, report = saturate(graph, strict=False)
    rule = next(r for r in report.rules if r.name == "scale-folds-into-linear-before-it")
    assert rule.fired == 0
    assert rule.refused == {"there is no scale": 1}
    assert rule.refusals == (RuleRefusal("there is no scale", 4),)
    assert "scale-folds-into-linear-before-it: 0 fired; 1 refused: there is no scale" in str(report)


def test_batch_normalization_becomes_one_convolution_and_one_shift() -> None:
    lines = [
        "f64[4,2,2,2] = constant {digest=1f}",
        "f64[1,4,3,3] = conv(%0, %1) {strides=(1,1), pads_begin=(0,0), pads_end=(0,0), dilations=(1,1), groups=1}",
        "f64[1,4,1,1] = constant {elements=[0.5, 2.0, 3.0, 0.25]}",
        "f64[1,4,3,3] = broadcast(%3) {shape=(1,4,3,3)}",
    ]
    for i, op in enumerate(("sub", "mul", "mul", "add")):
        lines.append(f"f64[1,4,3,3] = {op}(%{2 if not i else i + 4}, %4)")
    result, _ = saturate(parse_graph(unary("f64[1,2,4,4]", *lines)), strict=False)
    (output,) = (value for _, value in result.outputs)
    folded = [p for p in _depth_two(result, output) if p == ("add", "conv", "broadcast")]
    assert folded == [("add", "conv", "broadcast")]


def _depth_two(graph: PrimitiveGraph, value: int) -> list[tuple[str, ...]]:
    found = []
    for p in graph.producers[value]:
        inputs = graph.primitives[p].inputs
        ops = [graph.primitives[graph.producers[v][0]].op if graph.producers[v] else "given" for v in inputs]
        found.append((graph.primitives[p].op, *ops))
    return found


def test_what_needs_its_own_output_is_left_out() -> None:
    graph = parse_graph(
        'graph(%0 "x": f32[2,3]) -> (%4 "y", %3 "z")\n'
        "%1: f32[2,3] = exp(%0)\n"
        "%2: f32[3,2] = transpose(%1) {perm=(1, 0)}\n"
        "   | reshape(%3) {shape=(3, 2)}\n"
        "%3: f32[3,1,2] = reshape(%2) {shape=(3, 1, 2)}\n"
        "%4: f32[3,2] = neg(%2)\n"
    )
    kept = without_circular(graph)
    assert [p.op for p in kept.primitives] == ["exp", "transpose", "reshape", "neg"]
    assert without_circular(kept) is kept


def test_a_way_around_its_own_output_keeps_an_alternative() -> None:
    graph = parse_graph(
        'graph(%0 "x": f32[2,3]) -> (%3 "y", %2 "z")\n'
        "%1: f32[3,2] = transpose(%0) {perm=(1, 0)}\n"
        "   | reshape(%2) {shape=(3, 2)}\n"
        "%2: f32[3,1,2] = reshape(%1) {shape=(3, 1, 2)}\n"
        "   | reshape(%3) {shape=(3, 1, 2)}\n"
        "%3: f32[6] = reshape(%0) {shape=(6,)}\n"
    )
    assert without_circular(graph) is graph


def test_rules_leave_products_of_bytes_exact() -> None:
    attributes = "{strides=(1,1), pads_begin=(0,0), pads_end=(0,0), dilations=(1,1), groups=1}"
    graph = parse_graph(
        'graph(%0 "x": u8[1,16,9,8]) -> (%2 "y", %4 "z", %6 "v")\n'
        "%1: i8[16,16,3,3] = constant {digest=1f}\n"
        f"%2: i32[1,16,7,6] = conv(%0, %1) {attributes}\n"
        "%3: i8[4,16,1,1] = constant {digest=2f}\n"
        f"%4: i32[1,4,9,8] = conv(%0, %3) {attributes}\n"
        "%5: i8[6,16,1,1] = constant {digest=3f}\n"
        f"%6: i32[1,6,9,8] = conv(%0, %5) {attributes}\n"
    )
    result, report = apply_rules(graph, RULES)
    assert not any(rule.failures for rule in report.rules)
    assert {rule.name for rule in report.rules if rule.fired} >= {"siblings-are-one-linear"}
    assert_alternatives_agree(result, graph)
