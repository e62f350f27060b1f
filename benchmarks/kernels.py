"""Compares Korch's linear kernels with oneDNN's, on the shapes of the benchmark models.

    python -m benchmarks.kernels [--models candy,yolox] [--tables pair] [--output results.json]

The fastest kernel of each provider is measured for each matrix product and each convolution of the
models and of their rewrites. Kernels are timed as in a search: alone, interleaved with the others
of the batch, with the caches in the state that they have in a plan. Each provider uses its best layouts; changes
of layout are not counted. The tables are:

- *product*, *convolution*, *depthwise*: the same primitive, by Korch's generators and by oneDNN; a rewrite turns a
  pointwise convolution of one image into a product, so each provider counts with its faster kernel of the two forms;
- *winograd*: Korch's convolution by Winograd's algorithm, compared with oneDNN's direct convolution;
- *pair*: a depthwise and a pointwise convolution and the elementwise steps between them in one kernel,
  compared with the fastest way to use two calls of oneDNN: the steps are post-operations of a convolution,
  or a generated kernel between the calls computes them.

A quotient above 1 means that Korch's kernel takes less time. If only some tables are measured, the
rows of the others stay in the output file.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.models import PAPER, build
from benchmarks.rows import known_rows, write_rows
from korch.backend import open_meter
from korch.candidate.candidate import Candidate
from korch.measure.meter import AnyMeter
from korch.measure.record import Measured
from korch.options import Options
from korch.pipeline import Run, front
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.search.instance import Answers
from korch.segments.block_task import prepare
from korch.system.extras import install_command
from korch.system.libraries import find_library

OWN = ("conv", "gemm", "winograd")
TABLES = ("product", "convolution", "depthwise", "winograd", "pair")
OFFERS = 6
"""The number of kernels that are measured for one group and provider: those with the least bounds."""

Row = dict[str, Any]


def main() -> int:
    """Measure all models' shapes and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(PAPER))
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cache", type=Path, help="folder of measurements; a new one if not given")
    args = parser.parse_args()
    if find_library("dnnl") is None:
        parser.error(f"oneDNN is not installed; {install_command('onednn')}")
    tables = args.tables.split(",")
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models.split(","):
            for row in measure(name, args.cache or Path(folder), tables):
                print(rows.setdefault(row["key"], row), flush=True)
    join_products(list(rows.values()))
    others = [row for row in known_rows(args.output, "rows") if row["table"] not in tables]
    write_rows(args.output, [*others, *rows.values()], "rows")
    return 0


def join_products(rows: Sequence[Row]) -> None:
    """Give pointwise convolutions of one image the times of the equivalent products, if those are less."""
    products = {row["what"]: row for row in rows if row["table"] == "product"}
    for row in rows:
        found = re.fullmatch(r"f32\[1,(\d+),(\d+),(\d+)\] f32\[(\d+),\1,1,1\] -> f32\[1,\4,\2,\3\]", row["what"])
        if row["table"] != "convolution" or found is None:
            continue
        terms, height, width, rows_ = map(int, found.groups())
        columns = height * width
        same = products.get(f"f32[{rows_},{terms}] f32[{terms},{columns}] -> f32[{rows_},{columns}]")
        if same is not None:
            row |= {time: min(row[time], same[time]) for time in ("korch_us", "onednn_us")}


def measure(name: str, cache: Path, tables: Sequence[str] = TABLES) -> list[Row]:
    """Return a row for each distinct group of a model for which both providers have kernels."""
    options = replace(Options(), cache_folder=cache)
    partition, _ = front(Run(options, {}, lambda stage, text: None, build(name)))
    rows = []
    with open_meter(options) as meter:
        for block in partition.blocks:
            task = prepare(partition, block, Answers(meter.providers, meter.target), options)
            rows += compare(block.graph, task.candidates, meter, tables)
    return rows


def compare(
    graph: PrimitiveGraph, candidates: Sequence[Candidate], meter: AnyMeter, tables: Sequence[str]
) -> list[Row]:
    """Return the rows of one graph; candidates are measured first."""
    by_kind: dict[tuple[str, str, int], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        kind = kind_of(graph, candidate)
        maker = "onednn" if candidate.provider == "onednn" else "korch"
        is_rival = maker == "onednn" and "winograd" in tables
        if kind is not None and (is_rival or _table(graph, kind, candidate) in tables):
            by_kind[maker, kind, candidate.group.outputs[0]].append(candidate)
    best = {place: _least(found, meter) for place, found in by_kind.items()}
    calls = {
        place: list(two_calls(graph, found[0], candidates))
        for place, found in best.items()
        if place[:2] == ("korch", "pair")
    }
    parts = [part for ways in calls.values() for way in ways for part in way]
    meter.measure([c for found in (*best.values(), *(_least(p, meter) for p in parts)) for c in found])
    rows = []
    for (maker, kind, value), own in best.items():
        if kind == "pair":
            others = [_sum_ns(way, meter) for way in calls.get((maker, kind, value), ())]
        else:
            others = [fastest(best.get(("onednn", "direct", value), ()), meter)]
        own_ns = fastest(own, meter)
        other_ns = min((ns for ns in others if ns is not None), default=None)
        if maker == "onednn" or own_ns is None or other_ns is None:
            continue
        rows.append(
            {
                "key": own[0].group.key,
                "table": _table(graph, kind, own[0]),
                "what": _what(own[0]),
                "korch_us": own_ns / 1e3,
                "onednn_us": other_ns / 1e3,
            }
        )
    return rows


def _least(candidates: Iterable[Candidate], meter: AnyMeter) -> list[Candidate]:
    """Return the candidates that are measured: those with the least bounds."""
    return sorted(candidates, key=meter.bound_ns)[:OFFERS]


def two_calls(
    graph: PrimitiveGraph, pair: Candidate, candidates: Iterable[Candidate]
) -> Iterator[tuple[list[Candidate], ...]]:
    """Yield the ways to compute a pair's group with two calls of oneDNN.

    Each way is a tuple of lists of candidates: those for the first call, those for the second call,
    and those for the generated kernel that computes the remaining steps, if there are any.
    """
    whole = frozenset(pair.group.primitives)
    by_part: dict[tuple[str, frozenset[int]], list[Candidate]] = defaultdict(list)
    for c in candidates:
        part = frozenset(c.group.primitives)
        if part and part < whole and len(c.group.outputs) == 1:
            by_part[c.provider, part].append(c)
    one_linear, other_linear = _linear(graph, pair)
    calls = [part for provider, part in by_part if provider == "onednn"]
    for one in (part for part in calls if one_linear in part):
        for other in (part for part in calls if other_linear in part and not part & one):
            way = [by_part["onednn", one], by_part["onednn", other]]
            rest = whole - one - other
            if rest:
                way.append(by_part.get(("generated", rest), []))
            if all(way) and _is_whole(pair, [part[0] for part in way]):
                yield tuple(way)


def _is_whole(pair: Candidate, parts: Sequence[Candidate]) -> bool:
    """Return whether the parts read only the inputs of the pair's group and each other's outputs."""
    known = {*pair.group.inputs, *(part.group.outputs[0] for part in parts)}
    return all(value in known for part in parts for value in part.group.inputs)


def _sum_ns(way: Iterable[Iterable[Candidate]], meter: AnyMeter) -> int | None:
    """Return the sum of the times of the fastest kernel of each part; None if a part has no measured kernel."""
    times = [fastest(part, meter) for part in way]
    return None if None in times else sum(filter(None, times))


def kind_of(graph: PrimitiveGraph, candidate: Candidate) -> str | None:
    """Return the kind of a candidate: direct, winograd or pair; None for all others.

    "direct" is a single product or convolution; a "pair" may have elementwise steps between its convolutions.
    """
    if candidate.provider not in (*OWN, "onednn") or len(candidate.group.outputs) != 1:
        return None
    members = [graph.primitives[p] for p in candidate.group.primitives]
    linear = [graph.primitives[p] for p in _linear(graph, candidate)]
    if len(members) == 1 and linear and linear[0].op in ("conv", "matmul"):
        return "direct"
    if len(linear) == 1 and linear[0].op == "winograd":
        return "winograd" if all(p.op in ("pad", "winograd") for p in members) else None
    is_pair = len(linear) == 2 and linear[-1].output == candidate.group.outputs[0]
    return "pair" if is_pair and _is_pair(graph, linear) else None


def _is_pair(graph: PrimitiveGraph, linear: Sequence[Primitive]) -> bool:
    """Return whether one of two convolutions is depthwise and the other one pointwise."""
    if any(p.op != "conv" for p in linear):
        return False
    kernels = [graph.types[p.inputs[1]].shape for p in linear]
    depthwise = [k[1] == 1 and k[0] > 1 for k in kernels]
    pointwise = [all(size == 1 for size in k[2:]) and k[1] > 1 for k in kernels]
    return (depthwise[0] and pointwise[1]) or (pointwise[0] and depthwise[1])


def _linear(graph: PrimitiveGraph, candidate: Candidate) -> list[int]:
    """Return the numbers of a group's linear primitives."""
    members = candidate.group.primitives
    return [p for p in members if graph.primitives[p].row.category is Category.LINEAR]


def _table(graph: PrimitiveGraph, kind: str, candidate: Candidate) -> str:
    if kind != "direct":
        return kind
    primitive = graph.primitives[candidate.group.primitives[0]]
    if primitive.op == "matmul":
        return "product"
    kernel = graph.types[primitive.inputs[1]].shape
    return "depthwise" if kernel[1] == 1 and kernel[0] > 1 else "convolution"


def _what(candidate: Candidate) -> str:
    shapes = " ".join(map(str, candidate.group.input_types))
    return f"{shapes} -> {candidate.group.output_types[0]}"


def fastest(candidates: Iterable[Candidate], meter: AnyMeter) -> int | None:
    """Return the least measured time, in nanoseconds; None if all have failed."""
    records = (meter.known(candidate) for candidate in candidates)
    return min((r.time_ns for r in records if isinstance(r, Measured)), default=None)


if __name__ == "__main__":
    raise SystemExit(main())
