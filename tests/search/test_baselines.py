"""Plans to compare the searched one with."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from korch.ablation import Ablation
from korch.candidate.candidate import Candidate, Offer, make_group
from korch.limits import DEFAULT_LIMITS
from korch.options import Options
from korch.pipeline import Run, run_until
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.types import ValueType
from korch.search.baselines import baseline_plans, grown_by_rules, is_fused_by_rules
from korch.search.instance import Instance
from korch.search.result import PlanName
from korch.system.deadline import Deadline
from tests.support.models import parsed

SQUARE = ValueType.parse("f32[8,8]")


def candidate(graph: PrimitiveGraph, primitives: Sequence[int], provider: str = "own") -> Candidate:
    """Return a candidate in plain layouts that writes what its last primitive computes."""
    group = make_group(graph, tuple(primitives), (graph.primitives[primitives[-1]].output,))
    return Candidate(group, provider, Offer(*group.plain_layouts))


@pytest.mark.parametrize(
    ("ops", "is_fused"),
    [
        (("exp", "reduce_max", "neg"), True),
        (("reduce_max", "transpose", "reduce_max"), False),
        (("matmul", "neg", "reduce_max"), False),
        (("transpose", "matmul", "neg"), True),
        (("neg", "matmul"), False),
        (("transpose", "neg", "transpose", "matmul"), False),
        (("matmul", "neg", "matmul"), False),
    ],
)
def test_what_rules_fuse(ops: tuple[str, ...], is_fused: bool) -> None:
    builder = GraphBuilder()
    weights, value = builder.input("w", SQUARE), builder.input("x", SQUARE)
    attributes = {"transpose": TransposeAttributes((1, 0)), "reduce_max": ReduceAttributes((1,))}
    for op in ops:
        value = builder.add(op, [value, weights] if op == "matmul" else [value], attributes.get(op))
    builder.output("y", value)
    graph, every = builder.freeze(), range(len(ops))
    assert is_fused_by_rules(candidate(graph, every)) is is_fused
    assert is_fused_by_rules(candidate(graph, every, "attention")) is (is_fused or ops.count("matmul") == 2)


def test_what_a_group_reads_is_written_by_another_one() -> None:
    builder = GraphBuilder()
    x, products = builder.input("x", SQUARE), []
    for name in "ab":
        products.append(builder.add("matmul", [x, builder.input(name, SQUARE)]))
    builder.output("y", builder.add("neg", [builder.add("add", products)]))
    graph = builder.freeze()
    groups = ((0,), (1,), (2,), (3,), (2, 3), (0, 2), (1, 2), (0, 2, 3), (1, 2, 3))
    found = [candidate(graph, group) for group in groups]
    grown = {c.group.primitives for c in grown_by_rules(graph, found)}
    assert {(0,), (1,), (2, 3), (0, 2, 3), (1, 2, 3)} <= grown  # one product joins the sum, the other one is written
    assert {c.group.primitives for c in grown_by_rules(graph, [*found[:4], found[4]])} >= {(0,), (1,), (2, 3)}


def test_once_computes_nothing_twice_and_by_rules_and_split_fuse_less() -> None:
    builder = GraphBuilder()
    a = builder.add("exp", [builder.input("x", SQUARE)])
    for name, op in (("y", "neg"), ("z", "abs")):
        builder.output(name, builder.add("matmul", [builder.add(op, [a]), builder.input(f"w{name}", SQUARE)]))
    graph = builder.freeze()
    assert [p.op for p in graph.primitives] == ["exp", "neg", "matmul", "abs", "matmul"]
    groups = ((0,), (1,), (2,), (3,), (4,), (0, 1), (0, 3), (1, 2), (3, 4), (0, 1, 2), (0, 3, 4))
    found = [candidate(graph, group) for group in groups]

    def cost_ns(candidate: Candidate) -> tuple[int, bool]:
        return 10, True  # so that the plan with the fewest kernels is the cheapest

    ledger: Any = SimpleNamespace(
        limits=DEFAULT_LIMITS,
        left_s=lambda deadline: deadline.left_s,
        cost_ns=cost_ns,
        is_measured=lambda candidate: True,
        guesses_ns=lambda some: [0] * len(some),
        solve=lambda solver, costs, seconds: solver.solve(costs, seconds=seconds),
    )
    plans = baseline_plans(Instance(graph, found), ledger, 10.0, found[-2:])
    sizes = {name: sorted(len(c.group.primitives) for c in steps) for name, steps in plans.items()}
    assert sizes[PlanName.PLAIN_LAYOUT] == [3, 3]
    assert sizes[PlanName.ONCE] == [1, 2, 2]
    assert sizes[PlanName.BY_RULES] == [1, 1, 2, 2]
    assert sizes[PlanName.SPLIT] == [1] * 5
    assert baseline_plans(Instance(graph, found), ledger, 10.0, found[-2:], Deadline(0.0)) == {}  # no time is left


def test_a_search_can_be_limited_to_groups_by_rules(cache_folder: Path) -> None:
    model = parsed("(float[64,64] x, float[64,64] w) => (float[64,64] y) { a = MatMul(x, w) y = Exp(a) }")
    found: dict[str, list[set[str]]] = {}
    for groups in ("any", "by-rules"):
        options = Options(ablation=Ablation(groups=groups), cache_folder=cache_folder)  # type: ignore[arg-type]
        run = Run(options, {}, lambda update: None, model)
        with run.resources:
            run_until(run, "candidates", skip=("reference",))
            candidates = [c for task in run.results["candidates"].tasks for c in task.candidates]
        found[groups] = [{p.op for p in c.group.body.primitives} for c in candidates]
    assert {"matmul"} in found["any"] and {"matmul"} not in found["by-rules"]
    assert {"matmul", "exp"} in found["by-rules"] and {"exp"} in found["by-rules"]
