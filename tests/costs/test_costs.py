"""Features of candidates, and the learned model of costs in the package."""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.records import candidate_of, read_rows, row_of, write_rows
from korch.candidate.candidate import Candidate, Offer, make_group
from korch.candidate.layout import Layout, channels_last
from korch.costs.access import Traces, reduced_strides, strides
from korch.costs.analysis import analyse
from korch.costs.calibrated import LEVEL, score
from korch.costs.features import features
from korch.costs.model import FAMILIES, CostModel, RegressionTrees, model_for
from korch.costs.rates import Calibration
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import ReshapeAttributes, SliceAttributes, TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import ValueType
from korch.records import read_record
from korch.target import Target

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks" / "records").glob("*.jsonl.gz"))


def candidate(builder: GraphBuilder, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> Candidate:
    graph = builder.freeze()
    group = make_group(graph, range(len(graph.primitives)), [value for _, value in graph.outputs])
    return Candidate(group, "generated", Offer(inputs, outputs, is_loop_nest=True))


def normalized(layout: Layout) -> Candidate:
    """Subtract the sum over channels from an image."""
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[1,64,8,6]"))
    total = builder.add("reduce_sum", [x], ReduceAttributes((1,)))
    builder.output("y", builder.add("sub", [x, builder.add("broadcast", [total], BroadcastAttributes((1, 64, 8, 6)))]))
    return candidate(builder, (layout,), (layout,))


def both(found: Candidate) -> tuple[dict[int, int], list[int]]:
    """Return the distances of neighbours and of terms."""
    traces = Traces(found.group.body)
    return strides(found, traces), reduced_strides(found, traces)


def test_the_distance_of_neighbours_follows_the_layout() -> None:
    assert both(normalized(Layout.plain(4))) == ({0: 1}, [48])
    # Along channels, the innermost axis, neighbours are neighbours too, and so are the terms of the sum.
    assert both(normalized(channels_last(4))) == ({0: 1}, [1])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (TransposeAttributes((1, 0)), 6),
        (ReshapeAttributes((6, 4)), 1),
        (SliceAttributes((0, 0), (4, 3), (1, 2)), 2),
        (SliceAttributes((0, 5), (4, 3), (1, -1)), 1),
    ],
)
def test_neighbours_are_traced_through_moves(change: TransposeAttributes | ReshapeAttributes, expected: int) -> None:
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[4,6]"))
    op = type(change).__name__.removesuffix("Attributes").lower()
    builder.output("y", builder.add("neg", [builder.add(op, [x], change)]))
    assert both(candidate(builder, (Layout.plain(2),), (Layout.plain(2),)))[0] == {0: expected}


@pytest.mark.parametrize("shape", ["f32[0,6]", "f32[1,1]", "f32[]"])
def test_values_without_neighbours_have_no_distance(shape: str) -> None:
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse(shape))
    builder.output("y", builder.add("neg", [x]))
    plain = Layout.plain(ValueType.parse(shape).rank)
    assert both(candidate(builder, (plain,), (plain,)))[0] == {}


def test_trees_add_up_the_values_of_the_leaves() -> None:
    one = [[0, 0.5, 1, 2], [10.0], [1, 2.5, 3, 4], [20.0], [30.0]]
    found = RegressionTrees.of([one, [[1.0]]]).predict(np.array([[0.5, 9], [0.6, 2.5], [0.6, 2.6]], np.float32))
    assert found.tolist() == [11, 21, 31]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_the_model_in_the_package_knows_the_records(path: Path) -> None:
    """It was learned from them; half of all predictions are within 15 %, and most errors within three spreads."""
    header, *rows = read_rows(path)
    target = read_record(Target, header["target"], "target")
    calibration, model = Calibration.from_text(header["calibration"]), model_for(target.isa)
    assert model is not None
    rows = rows[:: len(rows) // 400]
    candidates = [candidate_of(row) for row in rows]
    analyses = [analyse(c, calibration, is_cold=row["cold"]) for c, row in zip(candidates, rows, strict=True)]
    described = [features(c, a, target) for c, a in zip(candidates, analyses, strict=True)]
    found = model.predict(described, [a.guess_ns for a in analyses])
    errors = np.abs([np.log(time_ns / row["ns"]) for (time_ns, _), row in zip(found, rows, strict=True)])
    assert np.median(errors) < np.log(1.15)
    assert np.mean(errors < 3 * np.array([spread for _, spread in found])) > 0.97
    margins = {kind: tail.margin() for kind, tail in model.tails.items()}
    known = [(c.provider, *p, row["ns"]) for c, p, row in zip(candidates, found, rows, strict=True)]
    scores = [score(ns, time_ns, spread) <= margins[kind] for kind, ns, spread, time_ns in known]
    assert np.mean(scores) >= LEVEL and sum(map(math.isfinite, margins.values())) >= 2


def test_records_are_read_as_they_are_written(tmp_path: Path) -> None:
    first, second = normalized(Layout.plain(4)), normalized(channels_last(4))
    rows = [{"model": "m", "cold": False, **row_of(c), "ns": ns} for c, ns in ((first, 1), (second, 2), (first, 3))]
    write_rows(tmp_path / "x.jsonl.gz", rows)
    found = read_rows(tmp_path / "x.jsonl.gz")
    assert found == rows
    assert [candidate_of(row).key for row in found] == [first.key, second.key, first.key]


def test_only_instruction_sets_with_records_have_a_model() -> None:
    assert model_for("neon") is None
    assert all(isinstance(model_for(isa), CostModel) for isa in FAMILIES)
