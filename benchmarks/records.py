"""Collects times of kernels as records, from which `benchmarks.train` learns the model of costs.

    python -m benchmarks.records MODEL.onnx ... --output FILE.jsonl.gz [--most 800] [--compile-only]

For each model, groups of each kind are drawn at random, and all kernels that are offered for them are timed. The
first line of the file describes the machine, the others hold a kernel each: the group as text, the offer, and the
time. Rows of models that the file has already are kept; a run with `--compile-only` before fills the cache, so that
nothing is compiled while kernels are timed.
"""

import argparse
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from korch.candidate.candidate import Candidate, Group, Offer
from korch.candidate.layout import Layout
from korch.costs.analysis import analyse
from korch.measure.cpu import CpuMeter
from korch.measure.record import Measured
from korch.options import Options
from korch.pipeline import Run, run_until, untold
from korch.primitive.text import parse_graph
from korch.provider.provider import Kernel
from korch.records import plain
from korch.search.estimate import kinds

OFFERS = 6
"""The most offers of one group that are timed."""

LARGEST_NS = 40_000_000
"""Candidates that are guessed to take longer are left out: a plan has few of them, and they take long to time."""


def main() -> int:
    """Collect records of models; those in the file already are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--most", type=int, default=800, help="kernels of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-folder", type=Path, default=Options().cache_folder)
    parser.add_argument("--compile-only", action="store_true", help="fill the cache, and time nothing")
    args = parser.parse_args()
    rows = read_rows(args.output) if args.output.exists() else []
    known = {row["model"] for row in rows if "model" in row}
    for path in args.models:
        if path.stem not in known:
            rows += _collect(path, args, has_header=bool(rows))
            if not args.compile_only:
                write_rows(args.output, rows)
    return 0


def _collect(path: Path, args: argparse.Namespace, *, has_header: bool) -> list[dict[str, Any]]:
    """Time kernels of a model; return the rows."""
    run = Run(Options(cache_folder=args.cache_folder), {}, untold, path)
    with run.resources:
        run_until(run, "candidates", skip=("reference",))
        offered = run.results["candidates"]
        meter = offered.meter
        assert isinstance(meter, CpuMeter)
        found = {c.key: c for task in offered.tasks for c in task.candidates if not c.offer.is_in_place}
        chosen = draw(list(found.values()), args.most, random.Random(args.seed))
        is_cold = meter.reads_weights_from_memory
        chosen = [c for c in chosen if analyse(c, meter.calibration, is_cold=is_cold).guess_ns <= LARGEST_NS]
        if args.compile_only:
            meter.builder.compile([t for c in chosen if isinstance(k := meter.kernel(c), Kernel) for t in k.texts])
            print(f"{path.stem}: {len(chosen)} of {len(found)} candidates compiled", flush=True)
            return []
        times = [
            (c, r)
            for c, r in zip(chosen, meter.measure(chosen), strict=True)
            if isinstance(r, Measured) and not r.is_disturbed
        ]
        print(f"{path.stem}: {len(times)} of {len(chosen)} kernels timed undisturbed", flush=True)
        header = {"target": plain(meter.target), "calibration": meter.calibration.to_text()}
        rows = [] if has_header else [header]
        return rows + [{"model": path.stem, "cold": is_cold, **row_of(c), "ns": record.time_ns} for c, record in times]


def draw(candidates: Sequence[Candidate], most: int, rng: random.Random) -> list[Candidate]:
    """Return candidates of randomly drawn groups: about equally many of each kind, and all offers of a group."""
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        groups[candidate.group.key].append(candidate)
    by_kind: dict[Any, list[str]] = defaultdict(list)
    for key, offers in groups.items():
        by_kind[kinds(offers[0])[1]].append(key)
    queues = list(by_kind.values())
    for queue in queues:
        rng.shuffle(queue)
    found: list[Candidate] = []
    while queues and len(found) < most:
        rng.shuffle(queues)
        for queue in queues:
            offers = groups[queue.pop()]
            found += rng.sample(offers, min(OFFERS, len(offers)))
        queues = [queue for queue in queues if queue]
    return found[:most]


def row_of(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON data."""
    offer = candidate.offer
    return {
        "group": candidate.group.text,
        "provider": candidate.provider,
        "inputs": " ".join(map(str, offer.inputs)),
        "outputs": " ".join(map(str, offer.outputs)),
        "offer": [offer.variant, offer.work_flop, offer.pairs, offer.vector_flop, offer.is_loop_nest],
    }


def candidate_of(row: Mapping[str, Any]) -> Candidate:
    """Return the candidate that `row_of` wrote."""
    lines = row["group"].splitlines(keepends=True)
    marks = [line for line in lines if line.startswith("#")]
    body = parse_graph("".join(lines[len(marks) :]))
    constants = frozenset(int(mark.removeprefix("# constant i")) for mark in marks)
    group = Group(
        tuple(range(len(body.primitives))),
        tuple(value for _, value in body.inputs),
        tuple(value for _, value in body.outputs),
        constants,
        body,
    )
    variant, work_flop, pairs, vector_flop, is_loop_nest = row["offer"]
    inputs, outputs = (tuple(map(Layout.parse, row[name].split())) for name in ("inputs", "outputs"))
    offer = Offer(inputs, outputs, variant, work_flop, pairs, vector_flop, is_loop_nest=is_loop_nest)
    return Candidate(group, row["provider"], offer)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; the first one describes the machine."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return list(_with_groups(map(json.loads, lines)))


def _with_groups(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows; a group that is a number stands for the text with this number."""
    texts: list[str] = []
    for row in rows:
        if isinstance(group := row.get("group"), int):
            row["group"] = texts[group]
        elif group is not None:
            texts.append(group)
        yield row


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows; each group's text is written once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    places: dict[str, int] = {}
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=9) as file:
        for row in rows:
            group, written = row.get("group"), dict(row)
            if group in places:
                written["group"] = places[group]
            elif group is not None:
                places[group] = len(places)
            file.write(json.dumps(written, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
