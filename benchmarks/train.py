"""Learns the model of costs from records, and prints its errors on models that it was not trained on.

    python -m benchmarks.train [--records benchmarks/records] [--family avx512] [--without MODEL,...]
        [--write [FOLDER]] [--plot FILE.png]

Each model of the records is left out in turn. Printed are, for the kernels of left-out models, the median of the
relative error, its 90th percentile, the share within 25 %, the ratio of predicted to measured time by provider, and
the share of groups in which the offer with the least prediction takes at most 5 % longer than the group's fastest,
and the share of kernels of held-back models that are not faster than the calibrated bound that other models give.
The same is printed for the analytic guess times one factor, and for a search that has measured some kernels of the
model. With `--write`, a model of all records replaces the one in the package.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import candidate_of, read_rows
from korch.costs.analysis import analyse
from korch.costs.calibrated import ScoreTail
from korch.costs.features import Features, features
from korch.costs.model import FOLDER, LN_2, CostModel, spreads_of
from korch.costs.rates import Calibration
from korch.primitive.op import Array
from korch.records import plain, read_record
from korch.target import Target

TIME = {
    "objective": "regression_l1",
    "num_leaves": 31,
    "learning_rate": 0.06,
    "min_data_in_leaf": 12,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "lambda_l2": 2.0,
    "seed": 0,
    "deterministic": True,
    "num_threads": 1,
    "verbose": -1,
}
TREES = 300
SPREAD = TIME | {"objective": "regression", "num_leaves": 15, "min_data_in_leaf": 40}
SPREAD_TREES = 80
HELD_BACK = 2000
"""The least number of kernels on which the coverage of calibrated bounds is measured at a time."""

FEWEST = 5
"""A feature that fewer kernels have is left out."""


@dataclass(frozen=True)
class Data:
    """Kernels of records."""

    rows: Sequence[Features]  # the features of each
    log_ratio: Array  # log2 of time over guess
    model: Array  # the name of the model that each is from
    group: Array  # the text of each kernel's group
    provider: Array  # the provider of each
    machines: Sequence[str]  # the CPUs that the records are from


def read(paths: Sequence[Path], without: Sequence[str]) -> Data:
    """Return the kernels of some files, except those of some models."""
    found, ratios, names, groups, providers, machines = [], [], [], [], [], []
    for path in paths:
        header, *rows = read_rows(path)
        target = read_record(Target, header["target"], "target")
        calibration = Calibration.from_text(header["calibration"])
        machines.append(f"{target.cpu}, {target.isa}, {target.threads} threads")
        for row in (row for row in rows if row["model"] not in without):
            candidate = candidate_of(row)
            analysis = analyse(candidate, calibration, is_cold=row["cold"])
            found.append(features(candidate, analysis, target))
            ratios.append(np.log2(row["ns"] / max(1, analysis.guess_ns)))
            names.append(row["model"])
            groups.append(f"{path.name} {row['group']}")
            providers.append(candidate.provider)
    arrays = [np.asarray(values) for values in (ratios, names, groups, providers)]
    return Data(found, *arrays, machines)


def fit(table: Array, target: Array, settings: Mapping[str, Any], trees: int) -> Any:
    """Return trees that predict a target from a table of features."""
    import lightgbm

    return lightgbm.train(dict(settings), lightgbm.Dataset(table, target), trees)


def held_out(data: Data, table: Array) -> Array:
    """Return predictions for each kernel by trees that were trained without its model."""
    found = np.zeros(len(data.log_ratio))
    for name in np.unique(data.model):
        out = data.model == name
        trees = fit(table[~out], data.log_ratio[~out], TIME, TREES)
        found[out] = trees.predict(table[out])
    return found


def held_out_spreads(data: Data, table: Array, predicted: Array) -> Array:
    """Return predicted standard deviations for each kernel, by trees that were trained without its model."""
    found, size = np.zeros(len(predicted)), np.abs(predicted - data.log_ratio)
    for name in np.unique(data.model):
        out = data.model == name
        found[out] = fit(table[~out], size[~out], SPREAD, SPREAD_TREES).predict(table[out])
    return spreads_of(found)


def tails_of(kinds: Array, scores: Array) -> dict[str, ScoreTail]:
    """Return the tail of the scores of each kind."""
    return {str(kind): ScoreTail.of(scores[kinds == kind].tolist()) for kind in np.unique(kinds)}


def covered(data: Data, scores: Array, spreads: Array) -> str:
    """Return how often kernels are not faster than their calibrated bound, and how far it is below predictions.

    Models of at least `HELD_BACK` kernels are held back at a time, and the margins follow from the other models. Kinds
    with too few records to tell have no calibrated bound.
    """
    names, found, below = list(np.unique(data.model)), [], []
    np.random.default_rng(0).shuffle(names)
    while names:
        out = np.zeros(len(scores), bool)
        while names and (out.sum() < HELD_BACK or sum(np.isin(data.model, names)) < HELD_BACK):
            out |= data.model == names.pop()
        tails = tails_of(data.provider[~out], scores[~out])
        margins = np.array([tails[p].margin() if p in tails else np.inf for p in data.provider[out]])
        known = np.isfinite(margins)
        found.append((int((scores[out] <= margins)[known].sum()), int(known.sum())))
        below += np.exp(margins * spreads[out])[known].tolist()
    right, count = map(sum, zip(*found, strict=True))
    parts = ", ".join(f"{right / count:.2%} of {count}" for right, count in found)
    return (
        f"calibrated: {right / count:.2%} of {count} are not faster ({parts}); {np.median(below):.2f}x below (median)"
    )


def nodes_of(tree: Mapping[str, Any]) -> list[list[float]]:
    """Return a tree of LightGBM as the model's file holds it."""
    nodes: list[list[float]] = []

    def add(node: Mapping[str, Any]) -> int:
        place = len(nodes)
        nodes.append([])
        if "leaf_value" in node and "split_feature" not in node:
            nodes[place] = [round(float(node["leaf_value"]), 5)]
        else:
            left, right = add(node["left_child"]), add(node["right_child"])
            nodes[place] = [node["split_feature"], float(f"{node['threshold']:.6g}"), left, right]
        return place

    add(tree["tree_structure"])
    return nodes


def errors(log_error: Array) -> str:
    """Return the summary of errors that are logarithms to the base of 2."""
    size = np.abs(np.exp2(log_error) - 1)
    worst = np.exp2(np.quantile(np.abs(log_error), 0.9))
    return f"median {np.median(size):.1%}, 90 % within {worst:.2f}x, {np.mean(size < 0.25):.0%} within 25 %"


def ranked(data: Data, log_time: Array, predicted: Array) -> tuple[float, int]:
    """Return the share of groups whose offer of the least prediction is within 5 % of the fastest, and their number."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, group in enumerate(data.group):
        groups[group].append(i)
    several = [np.asarray(members) for members in groups.values() if len(members) > 1]
    right = [log_time[m][np.argmin(predicted[m])] <= log_time[m].min() + np.log2(1.05) for m in several]
    return float(np.mean(right)), len(right)


def adapted(data: Data, predicted: Array, share: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return predictions after a share of each model's kernels was measured, and which kernels were not."""
    found, rest = predicted.copy(), rng.random(len(predicted)) >= share
    for name in np.unique(data.model):
        for provider in np.unique(data.provider):
            own = (data.model == name) & (data.provider == provider)
            known = own & ~rest
            if known.any():
                weight = known.sum() / (known.sum() + 3)
                found[own] += weight * np.median(data.log_ratio[known] - predicted[known])
    return found, rest


def report(data: Data, table: Array, predicted: Array) -> list[str]:
    """Return the errors of predictions on models that were left out."""
    guess = table[:, list_names(data).index("guess")]
    log_time = data.log_ratio + guess
    factor = np.median(data.log_ratio)
    lines = [f"{machine}" for machine in data.machines]
    lines.append(f"guess times one factor:  {errors(factor - data.log_ratio)}")
    lines.append(f"trees, model left out:   {errors(predicted - data.log_ratio)}")
    third, rest = adapted(data, predicted, 1 / 3, np.random.default_rng(0))
    lines.append(f"a third measured:        {errors((third - data.log_ratio)[rest])}")
    for name in np.unique(data.model):
        own = data.model == name
        lines.append(f"  {name:14s} {own.sum():5d} kernels: {errors((predicted - data.log_ratio)[own])}")
    for name in np.unique(data.provider):
        own = data.provider == name
        error = (predicted - data.log_ratio)[own]
        lines.append(f"  {name:14s} {own.sum():5d} kernels: {errors(error)}, bias {np.exp2(np.median(error)):.2f}")
    for name, values in (("guess", guess), ("trees", guess + predicted)):
        right, count = ranked(data, log_time, values)
        lines.append(f"ranking by {name}: right in {right:.0%} of {count} groups")
    return lines


def list_names(data: Data) -> list[str]:
    """Return the features that enough kernels have."""
    counts: dict[str, int] = defaultdict(int)
    for row in data.rows:
        for name, value in row.items():
            counts[name] += value != 0
    return sorted(name for name, count in counts.items() if count >= FEWEST)


def plot(data: Data, predicted: Array, path: Path) -> None:
    """Draw, for kernels of left-out models, the predicted time over the measured time."""
    from matplotlib.figure import Figure

    time = np.array([row["guess"] for row in data.rows]) + data.log_ratio
    figure = Figure((9, 4), layout="constrained")
    rows = {"bytes and operations, one factor": np.median(data.log_ratio), "learned, model left out": predicted}
    for axes, (title, values) in zip(figure.subplots(1, 2, sharey=True), rows.items(), strict=True):
        error = values - data.log_ratio
        axes.hexbin(time * np.log10(2) - 3, error, gridsize=60, bins="log", mincnt=1, cmap="viridis")
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set(title=title, xlabel="log10 of measured microseconds", ylim=(-4, 4))
    figure.axes[0].set_ylabel("log2 of predicted / measured")
    figure.savefig(path, dpi=80)


def main() -> int:
    """Print the errors on models that were left out; with `--write`, replace the model in the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=Path("benchmarks/records"))
    parser.add_argument("--family", default="avx512")
    parser.add_argument("--without", default="", help="models that are not learned, separated by commas")
    parser.add_argument("--write", type=Path, nargs="?", const=FOLDER, help="the folder of the model's file")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    data = read(sorted(args.records.glob(f"{args.family}*.jsonl.gz")), args.without.split(","))
    names = list_names(data)
    table = CostModel.table_of(names, data.rows)
    predicted = held_out(data, table)
    print("\n".join(report(data, table, predicted)))
    spreads = held_out_spreads(data, table, predicted)
    scores = LN_2 * (predicted - data.log_ratio) / spreads
    print(covered(data, scores, spreads))
    if args.plot is not None:
        plot(data, predicted, args.plot)
    if args.write is not None:
        time = fit(table, data.log_ratio, TIME, TREES)
        spread = fit(table, np.abs(predicted - data.log_ratio), SPREAD, SPREAD_TREES)
        count = f"{len(data.log_ratio)} kernels of {len(np.unique(data.model))} models ({'; '.join(data.machines)})"
        written = {
            "names": names,
            "time": [nodes_of(tree) for tree in time.dump_model()["tree_info"]],
            "spread": [nodes_of(tree) for tree in spread.dump_model()["tree_info"]],
            "tails": {kind: plain(tail) for kind, tail in tails_of(data.provider, scores.round(3)).items()},
            "about": f"{count}; error on a model left out: {errors(predicted - data.log_ratio)}",
        }
        path = args.write / f"{args.family}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(written, separators=(",", ":")).encode(), 9, mtime=0))
        print(f"{path}: {path.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
