"""Compares products of one or a few rows with a sum of the same number of bytes, for weights of each type.

    python -m benchmarks.one_row [--rows 1,2,4,8] [--near] [--rounds 3] [--output benchmarks/results/one_row.json]

A kernel is measured as in a search of a large model: its weights are in no cache. In the same rounds as each product,
another kernel adds up the same number of bytes of float32. The quotient is the time of the sum divided by the time of
the product: 1 means that the product reads its weights and their scales as fast as the sum reads its input. The table
has the median over the rounds, and the least and the largest quotient.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.memory_bound import Graph
from benchmarks.rows import write_rows
from korch.backend import open_meter
from korch.candidate.candidate import Candidate, Group
from korch.measure.record import Measured
from korch.options import Options
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.ops.stored import StoredAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider

SIZES = ((2048, 2048), (2048, 7168), (4096, 4096))
"""Terms and columns of products in language models with one to seven billion parameters."""

NEAR = ((1024, 192),)
"""Terms and columns of the products whose weights are in a core's cache."""

WEIGHTS_BYTES = 1 << 30
"""The bytes of weights that the meter assumes for the model: more than any cache holds."""

GOAL = 0.8


def filled(shape: tuple[int, int], dtype: DType) -> np.ndarray:
    """Return a matrix whose elements are not all equal."""
    return (np.arange(shape[0] * shape[1]) % 7).reshape(shape).astype(dtype.numpy)


def floats(m: int, k: int, n: int, dtype: DType) -> Group:
    """Return a product of m rows by weights of a type; other types than float32 are cast to it."""
    g = Graph()
    weights = g.constant(filled((k, n), dtype))
    if dtype is not DType.F32:
        weights = g.add("cast", [weights], CastAttributes(DType.F32.value))
    return g.group(g.add("matmul", [g.tensor(m, k), weights]))


def integers(m: int, k: int, n: int, bits: int, block: int) -> Group:
    """Return a product of m rows by integers, with a scale for each `block` of terms; 0 means one per column."""
    g = Graph()
    block = block or k
    q = g.constant(filled((k * bits // 8, n), DType.I8 if bits == 8 else DType.U8))
    scales = g.constant(filled((k // block, n), DType.F32))
    attributes = StoredAttributes(bits, block, 8 if bits == 4 else 0)
    return g.group(g.add("matmul_stored", [g.tensor(m, k), q, scales], attributes))


def sum_of(read: int) -> Group:
    """Return the sums of the 64 rows of a float32 tensor of `read` bytes."""
    g = Graph()
    rows = g.input("rows", ValueType((64, read // 256), DType.F32))
    group = g.group(g.add("reduce_sum", [rows], ReduceAttributes((1,))))
    return replace(group, constant_inputs=frozenset({0}))  # so that this input is in no cache either


WEIGHTS: Mapping[str, Callable[[int, int, int], Group]] = {
    "float32": partial(floats, dtype=DType.F32),
    "bfloat16": partial(floats, dtype=DType.BF16),
    "float16": partial(floats, dtype=DType.F16),
    "int8, a scale per column": partial(integers, bits=8, block=0),
    "int8, blocks of 32": partial(integers, bits=8, block=32),
    "int4, blocks of 32": partial(integers, bits=4, block=32),
    "int4, blocks of 128": partial(integers, bits=4, block=128),
}


def bytes_of(group: Group) -> int:
    """Return the bytes of the constants that a group reads."""
    return sum(group.input_types[i].size_bytes for i in group.constant_inputs)


def main() -> int:
    """Measure; return 1 if the median quotient of a product is below `GOAL`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1")
    parser.add_argument("--near", action="store_true", help="weights in the cache of the only thread's core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    products, sums = GemmProvider(), GeneratedProvider()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options = Options(cache_folder=folder, **({"threads": 1} if args.near else {}))
        meter = open_meter(options, 0 if args.near else WEIGHTS_BYTES)
        for (k, n), m in itertools.product(NEAR if args.near else SIZES, map(int, args.rows.split(","))):
            for name, make in WEIGHTS.items():
                group = make(m, k, n)
                pair = [
                    [Candidate(g, p.name, offer, p.version) for offer in p.offer(g, meter.target)]
                    for g, p in ((group, products), (sum_of(bytes_of(group)), sums))
                ]
                found = []
                for _ in range(args.rounds):
                    records = meter.measure_again([*pair[0], *pair[1]])
                    times = [r.time_ns if isinstance(r, Measured) else float("inf") for r in records]
                    own, other = min(times[: len(pair[0])]), min(times[len(pair[0]) :])
                    found.append((other / own, bytes_of(group) / own, bytes_of(group) / other))
                quotients = sorted(quotient for quotient, *_ in found)
                rows.append(
                    {
                        "weights": name,
                        "rows": m,
                        "terms": k,
                        "columns": n,
                        "bytes": bytes_of(group),
                        "quotient": [quotients[0], statistics.median(quotients), quotients[-1]],
                        "gb_per_s": statistics.median(own for _, own, _ in found),
                        "sum_gb_per_s": statistics.median(other for *_, other in found),
                    }
                )
                low, middle, high = rows[-1]["quotient"]
                text = f"{middle:.2f} ({low:.2f} to {high:.2f}), {rows[-1]['gb_per_s']:.1f} GB/s"
                print(f"{m:2} x {k:5} x {n:5} {name:26} {text}", flush=True)
        meter.close()
    write_rows(args.output, rows, "rows")
    return int(any(row["quotient"][1] < GOAL for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
