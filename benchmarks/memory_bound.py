"""Compares generated memory-bound kernels with a copy of the same number of bytes.

    python -m benchmarks.memory_bound [--output benchmarks/results/memory_bound.json]

The shapes are those of the benchmark models, with more images or sequences for the larger levels of
cache. Each kernel is measured as in a search: alone, interleaved with the others of its batch, with
inputs that were just written. The copy is made by the same generator, reads and writes the same number of
bytes in total, and is timed in the same rounds. A quotient of 1 means that a kernel is as fast as its
copy. Kernels with transcendental functions or divisions may be unable to reach 1.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import write_rows
from korch.backend import open_meter
from korch.candidate.candidate import Candidate, Group, Offer, make_group, make_layout_change
from korch.candidate.layout import Layout
from korch.measure.record import Measured
from korch.options import Options
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.generated import GeneratedProvider

LEVELS = {"L2": 1, "L3": 16, "DRAM": 128}
"""The number of images or sequences for each level: their data fits this level, but not the level before it."""

Row = dict[str, Any]


class Graph(GraphBuilder):
    """A graph builder with short names for frequent steps."""

    def tensor(self, *shape: int) -> int:
        """Return a new input."""
        return self.input(f"x{len(self._inputs)}", ValueType(shape, DType.F32))

    def wide(self, value: int, shape: tuple[int, ...]) -> int:
        """Return a value, broadcast to a larger shape."""
        return self.add("broadcast", [value], BroadcastAttributes(shape))

    def number(self, like: int, number: float) -> int:
        """Return a constant with the shape of a value, filled with a number."""
        return self.constant(np.broadcast_to(np.float32(number), self.type(like).shape))

    def group(self, value: int) -> Group:
        """Return one group of all primitives, with one output."""
        self.output("y", value)
        graph = self.freeze()
        return make_group(graph, range(len(graph.primitives)), [value])


def add_relu(n: int) -> Group:
    """The sum of two images, and a ReLU."""
    g = Graph()
    y = g.add("add", [g.tensor(n, 64, 40, 40), g.tensor(n, 64, 40, 40)])
    return g.group(g.add("max", [y, g.number(y, 0.0)]))


def scale_shift(n: int) -> Group:
    """Batch normalization whose scale and shift are inputs."""
    g = Graph()
    x, shape = g.tensor(n, 64, 40, 40), (n, 64, 40, 40)
    y = g.add("mul", [x, g.wide(g.tensor(1, 64, 1, 1), shape)])
    return g.group(g.add("add", [y, g.wide(g.tensor(1, 64, 1, 1), shape)]))


def silu(n: int) -> Group:
    """A sigmoid times its argument."""
    g = Graph()
    x = g.tensor(n, 64, 40, 40)
    return g.group(g.add("mul", [x, g.add("sigmoid", [x])]))


def softmax(n: int) -> Group:
    """Softmax over the keys of BERT's attention."""
    g = Graph()
    shape = (n, 6, 128, 128)
    x = g.tensor(*shape)
    last = ReduceAttributes((3,))
    top = g.wide(g.add("reduce_max", [x], last), shape)
    e = g.add("exp", [g.add("sub", [x, top])])
    return g.group(g.add("div", [e, g.wide(g.add("reduce_sum", [e], last), shape)]))


def layer_normalization(n: int) -> Group:
    """Layer normalization of BERT's rows."""
    g = Graph()
    shape, last = (n, 128, 768), ReduceAttributes((2,))

    def mean(value: int) -> int:
        total = g.add("reduce_sum", [value], last)
        return g.add("div", [total, g.number(total, 768.0)])

    x = g.tensor(*shape)
    d = g.add("sub", [x, g.wide(mean(x), shape)])
    variance = mean(g.add("mul", [d, d]))
    scale = g.add("sqrt", [g.add("add", [variance, g.number(variance, 1e-5)])])
    y = g.add("mul", [d, g.wide(g.add("reciprocal", [scale]), shape)])
    y = g.add("mul", [y, g.wide(g.tensor(768), shape)])
    return g.group(g.add("add", [y, g.wide(g.tensor(768), shape)]))


def reduction(axes: tuple[int, ...]) -> Callable[[int], Group]:
    """The sum of an image over some axes."""

    def make(n: int) -> Group:
        g = Graph()
        return g.group(g.add("reduce_sum", [g.tensor(n, 64, 56, 56)], ReduceAttributes(axes)))

    return make


def heads(n: int) -> Group:
    """The keys of all heads, transposed, with a scale."""
    g = Graph()
    x = g.add("reshape", [g.tensor(n, 128, 768)], ReshapeAttributes((n, 128, 12, 64)))
    y = g.add("transpose", [x], TransposeAttributes((0, 2, 3, 1)))
    return g.group(g.add("mul", [y, g.number(y, 0.35)]))


def matrix(n: int) -> Group:
    """A transposed matrix of an odd size."""
    g = Graph()
    return g.group(g.add("transpose", [g.tensor(197, 768 * n)], TransposeAttributes((1, 0))))


def resize(n: int) -> Group:
    """Upsampling by 2, nearest."""
    g = Graph()
    y = g.tensor(n, 32, 40, 40)
    for axis in (2, 3):
        indices = tuple(i // 2 for i in range(80))
        y = g.add("take", [y], TakeAttributes(axis, indices))
    return g.group(y)


def pad(n: int) -> Group:
    """Padding with a border of zeros."""
    g = Graph()
    sides = (0, 0, 1, 1)
    return g.group(g.add("pad", [g.tensor(n, 64, 40, 40)], PadAttributes(sides, sides)))


def concat(n: int) -> Group:
    """Concatenation of the channels of two images."""
    g = Graph()
    parts = [g.tensor(n, 32, 40, 40), g.tensor(n, 32, 40, 40)]
    return g.group(g.add("concat", parts, ConcatAttributes(1)))


def slice_(n: int) -> Group:
    """The slice of the keys from a tensor of queries, keys and values."""
    g = Graph()
    attributes = SliceAttributes((0, 0, 768), (n, 128, 768), (1, 1, 1))
    return g.group(g.add("slice", [g.tensor(n, 128, 2304)], attributes))


def change(n: int) -> Group:
    """The change of an image to another layout."""
    g = Graph()
    value = g.tensor(n, 64, 40, 40)
    g.output("y", g.add("neg", [value]))
    return make_layout_change(g.freeze(), value)


CASES: tuple[tuple[str, str, Callable[[int], Group]], ...] = (
    ("elementwise", "add relu", add_relu),
    ("elementwise", "scale shift", scale_shift),
    ("elementwise", "silu", silu),
    ("softmax", "128 keys", softmax),
    ("normalization", "layer of 768", layer_normalization),
    ("reduction", "over the image", reduction((2, 3))),
    ("reduction", "over channels", reduction((1,))),
    ("transpose", "heads", heads),
    ("transpose", "matrix", matrix),
    ("layout", "abcd acdb", change),
    ("layout", "acdb abcd", change),
    ("layout", "abcd aBcd16b", change),
    ("layout", "aBcd16b abcd", change),
    ("copy", "resize", resize),
    ("copy", "pad", pad),
    ("copy", "concat", concat),
    ("copy", "slice", slice_),
)
"""Table, name (for a change of layout: both layouts) and function from a number of images to a group."""


def main() -> int:
    """Measure all cases and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for level in args.levels.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(level, Path(folder))
    for row in rows:
        print(f"{row['level']} {row['table']} {row['what']}: copy / kernel {row['copy_us'] / row['kernel_us']:.2f}")
    write_rows(args.output, rows, "rows")
    return 0


def measure(level: str, cache: Path) -> list[Row]:
    """Return a row for each case at a level."""
    found = []
    for name, what, make in CASES:
        group = make(LEVELS[level])
        inputs, outputs = group.plain_layouts
        if group.is_layout_change:
            before, after = map(Layout.parse, what.split())
            inputs, outputs = (before,), (after,)
        found.append((name, what, candidate_of(group, Offer(inputs, outputs, is_loop_nest=True))))
    copies = {kernel.key: copy_of(kernel.read_bytes + kernel.write_bytes) for *_, kernel in found}
    with open_meter(replace(Options(), cache_folder=cache)) as meter:
        for *_, kernel in found:
            meter.measure([kernel, copies[kernel.key]])
        rows = []
        for name, what, kernel in found:
            records = meter.known(kernel), meter.known(copies[kernel.key])
            times = [r.time_ns / 1e3 for r in records if isinstance(r, Measured)]
            if len(times) == 2:
                size_bytes = kernel.read_bytes + kernel.write_bytes
                rows.append(
                    {
                        "table": name,
                        "what": what,
                        "level": level,
                        "bytes": size_bytes,
                        "kernel_us": times[0],
                        "copy_us": times[1],
                    }
                )
    return rows


def candidate_of(group: Group, offer: Offer) -> Candidate:
    """Return the candidate of the generated provider for a group."""
    return Candidate(group, GeneratedProvider.name, offer, GeneratedProvider.version)


def copy_of(size_bytes: int) -> Candidate:
    """Return the copy that reads and writes this many bytes in total."""
    g = Graph()
    value = g.tensor(size_bytes // 8)
    g.output("y", g.add("neg", [value]))
    plain = (Layout.plain(1),)
    return candidate_of(make_layout_change(g.freeze(), value), Offer(plain, plain, is_loop_nest=True))


if __name__ == "__main__":
    raise SystemExit(main())
