"""The learned model of costs: sums of regression trees over the features of a candidate.

It predicts the logarithm of a kernel's time over its analytic guess, and how far this prediction usually is from the
time. `python -m benchmarks.train` writes its file, one for each family of instruction sets.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from korch.costs.calibrated import ScoreTail
from korch.costs.features import Features
from korch.primitive.op import Array
from korch.records import read_record

FOLDER = Path(__file__).parent

FAMILIES = dict.fromkeys(("avx512_bf16", "avx512_vnni", "avx512"), "avx512") | {"avx2": "avx2"}
"""The file for each instruction set that has one."""

LN_2 = math.log(2)
MEAN_SIZE = math.sqrt(2 / math.pi)
"""The mean size of a normal error, in units of its standard deviation."""

LEAST_SPREAD = 0.05
"""The least standard deviation of a prediction's error: times of one kernel in two searches differ by as much."""

ROWS = 2048
"""Rows that are evaluated at once, so that the nodes of all trees stay in the cache."""


@dataclass(frozen=True, slots=True)
class RegressionTrees:
    """Regression trees, whose nodes are numbered in one sequence.

    The right child of a node follows the left one. A leaf compares with infinity, and is its own left child.
    """

    roots: Array  # the root of each tree
    column: Array  # the feature that each node compares
    limit: Array  # the value up to which a row goes to the left child
    left: Array  # the left child
    value: Array  # what a leaf adds
    depth: int  # the most comparisons from a root to a leaf

    @staticmethod
    def of(trees: Sequence[Sequence[Sequence[float]]]) -> RegressionTrees:
        """Return the trees of a file: for each node (column, limit, left, right), or (value,) for a leaf."""
        roots, depth = list[int](), 0
        rows: list[tuple[float, float, int, float]] = []  # column, limit, left child, value
        for nodes in trees:
            roots.append(len(rows))
            level, levels = [0], 0
            rows.append((0, math.inf, 0, 0.0))
            first = roots[-1]  # where the nodes of this level begin
            while level:
                below: list[int] = []
                for place, n in enumerate(level, first):
                    node = nodes[n]
                    if len(node) == 1:
                        rows[place] = (0, math.inf, place, node[0])
                        continue
                    rows[place] = (node[0], node[1], len(rows), 0.0)
                    rows += [(0, math.inf, 0, 0.0)] * 2
                    below += map(int, node[2:])
                first, level, levels = first + len(level), below, levels + 1
            depth = max(depth, levels - 1)
        column, limit, left, value = zip(*rows, strict=True)
        return RegressionTrees(
            np.array(roots, np.int32),
            np.array(column, np.int32),
            np.array(limit, np.float32),
            np.array(left, np.int32),
            np.array(value, np.float32),
            depth,
        )

    def predict(self, table: Array) -> Array:
        """Return the sum of the trees' values for each row of a table of features."""
        found = np.empty(len(table), np.float32)
        for begin in range(0, len(table), ROWS):
            rows = np.ascontiguousarray(table[begin : begin + ROWS])
            cells, before = rows.ravel(), np.arange(0, rows.size, rows.shape[1], dtype=np.int32)[:, None]
            at = np.broadcast_to(self.roots, (len(rows), len(self.roots)))
            for _ in range(self.depth):
                is_right = cells.take(before + self.column.take(at)) > self.limit.take(at)
                at = self.left.take(at) + is_right
            found[begin : begin + ROWS] = self.value.take(at).sum(1)
        return found


@dataclass(frozen=True)
class CostModel:
    """A learned model of costs."""

    names: tuple[str, ...]  # the features that it reads, in the order of columns
    time: RegressionTrees  # predicts log2(time / guess)
    spread: RegressionTrees  # predicts the size of that prediction's error, in the same unit
    # by kind of kernel, the scores of kernels of models that it was not trained on (`calibrated.py`)
    tails: Mapping[str, ScoreTail]
    about: str  # where its records come from, and its error on models that it was not trained on

    @staticmethod
    def table_of(names: Sequence[str], rows: Sequence[Features]) -> Array:
        """Return features as an array with a column for each of some names; features without a column are left out."""
        place = {name: i for i, name in enumerate(names)}
        found = np.zeros((len(rows), len(place)), np.float32)
        for r, row in enumerate(rows):
            for name, value in row.items():
                column = place.get(name)
                if column is not None:
                    found[r, column] = value
        return found

    def predict(self, rows: Sequence[Features], guesses_ns: Sequence[int]) -> list[tuple[int, float]]:
        """Return the predicted time of each candidate in nanoseconds, and the usual error of its logarithm.

        Args:
            rows: the features of each.
            guesses_ns: the analytic guess of each; where it is 0, nothing runs.
        """
        table = self.table_of(self.names, rows)
        times_ns = np.asarray(guesses_ns) * np.exp2(self.time.predict(table))
        spreads = spreads_of(self.spread.predict(table))
        return list(zip(map(int, times_ns), map(float, spreads), strict=True))

    @staticmethod
    def from_bytes(data: bytes) -> CostModel:
        """Return the model of a file."""
        read = json.loads(gzip.decompress(data))
        time, spread = (RegressionTrees.of(read[name]) for name in ("time", "spread"))
        tails = {kind: read_record(ScoreTail, tail, "tail") for kind, tail in read.get("tails", {}).items()}
        return CostModel(tuple(read["names"]), time, spread, tails, read["about"])


def spreads_of(sizes: Array) -> Array:
    """Return the standard deviations of the logarithms of times, for predicted sizes of the errors of log2(time)."""
    found: Array = np.maximum(LEAST_SPREAD, LN_2 / MEAN_SIZE * sizes).round(3)
    return found


@cache
def model_for(isa: str) -> CostModel | None:
    """Return the model for an instruction set; None if there is none."""
    name = FAMILIES.get(isa)
    path = FOLDER / f"{name}.json.gz"
    return CostModel.from_bytes(path.read_bytes()) if name is not None and path.exists() else None
