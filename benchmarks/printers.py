"""Compares kernels that are printed as LLVM IR with the same tile programs printed as C++.

    python -m benchmarks.printers [--models candy,segformer] [--most 100] [--cache folder] [--output results.json]

The candidates of the providers of generated kernels are sampled. Both kernels of a program are timed in one process,
interleaved, as in a search. Rows state the kind, both times and both times to compile. Without `--time`, kernels are
only compiled, so that a later run with the same cache only times them. A quotient above 1 means that LLVM's takes less
time.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.models import PAPER, build
from benchmarks.rows import write_rows
from korch.backend import open_meter
from korch.candidate.candidate import Candidate
from korch.measure.compiler import Builder
from korch.measure.cpu import CpuMeter
from korch.measure.record import Measured
from korch.measure.timer import Setup, time_kernels
from korch.options import Options
from korch.pipeline import Run, front
from korch.primitive.op import Category
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import comment_of, printed_kernel
from korch.search.instance import Answers
from korch.segments.block_task import prepare
from korch.tile.cpp.print import print_cpp
from korch.tile.ir.growth import UnprintableError
from korch.tile.llvm.print import print_llvm, refusal

Row = dict[str, Any]
BATCH = 40
LIBRARIES = ("onednn", "onnxruntime", "in place")


def main() -> int:
    """Measure the candidates of all models and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(PAPER))
    parser.add_argument("--most", type=int, default=100, help="candidates of each model")
    parser.add_argument("--kinds", default="", help="the kinds that are measured, separated by commas")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models.split(","):
            rows += measure(name, args.cache or Path(folder), args)
    for kind, own in sorted(by_kind(rows).items()):
        print(f"{kind:16} {len(own):4} kernels, geometric mean {mean(own):.3f}, least {min(map(quotient, own)):.3f}")
    write_rows(args.output, rows, "rows")
    return 0


def measure(name: str, cache: Path, args: argparse.Namespace) -> list[Row]:
    """Return a row for each sampled candidate of a model."""
    options = replace(Options(), cache_folder=cache)
    if args.threads:
        options = replace(options, threads=args.threads)
    partition, _ = front(Run(options, {}, lambda stage, text: None, build(name)))
    rows: list[Row] = []
    with open_meter(options) as meter:
        assert isinstance(meter, CpuMeter)
        found: dict[str, Candidate] = {}
        for block in partition.blocks:
            task = prepare(partition, block, Answers(meter.providers, meter.target), options)
            found |= {c.key: c for c in task.candidates if c.provider not in LIBRARIES}
        kinds = set(filter(None, args.kinds.split(",")))
        chosen = [c for c in found.values() if not kinds or kind_of(c) in kinds]
        chosen = random.Random(0).sample(chosen, min(args.most, len(chosen)))
        pairs = list(filter(None, (both(candidate, meter) for candidate in chosen)))
        print(f"{name}: {len(found)} candidates, {len(pairs)} of {len(chosen)} are printed both ways", flush=True)
        for i in range(0, len(pairs), BATCH):
            rows += compare(name, pairs[i : i + BATCH], meter, is_timed=args.time)
    return rows


def both(candidate: Candidate, meter: CpuMeter) -> tuple[Candidate, Kernel, Kernel] | None:
    """Return the kernels of a candidate printed as C++ and as LLVM IR."""
    provider = next(p for p in meter.providers if p.name == candidate.provider)
    target, group, offer = meter.target, candidate.group, candidate.offer
    kernel = provider.build(group, offer, target)
    program = kernel.program if isinstance(kernel, Kernel) else None
    if program is None or program.parameters or refusal(program, target):
        return None
    if offer.pairs and target.isa != "amx":  # C++ multiplies components on matrix units only
        return None
    text = comment_of(group, offer)
    try:
        cpp = printed_kernel(program, print_cpp(program, text, target.lanes, target.threads))
    except UnprintableError:  # bytes
        return None
    return candidate, cpp, printed_kernel(program, print_llvm(program, text, target))


def compare(
    name: str, pairs: Sequence[tuple[Candidate, Kernel, Kernel]], meter: CpuMeter, *, is_timed: bool
) -> Iterator[Row]:
    """Compile and time both kernels of some candidates."""
    kernels = [kernel for _, *two in pairs for kernel in two]
    builder = meter.builder
    seconds = [compiled_s(kernel, builder) for kernel in kernels]
    if not is_timed:
        return
    shared = dict.fromkeys(text for kernel in kernels for text in kernel.units)
    library = builder.library([*dict.fromkeys(kernel.source for kernel in kernels), *shared])
    target = meter.target
    setup = Setup(library, meter._timer, (), target.threads, own_cache_bytes=target.l2_bytes, l3_bytes=target.l3_bytes)
    jobs = [meter._job(candidate, kernel) for candidate, *two in pairs for kernel in two]
    records = time_kernels(jobs, setup)
    for i, (candidate, cpp, llvm) in enumerate(pairs):
        one, two = records[2 * i : 2 * i + 2]
        if isinstance(one, Measured) and isinstance(two, Measured):
            yield {
                "model": name,
                "kind": kind_of(candidate),
                "what": candidate.group.text,
                "variant": candidate.offer.variant,
                "layouts": " ".join(map(str, (*candidate.offer.inputs, *candidate.offer.outputs))),
                "cpp_us": one.time_ns / 1e3,
                "llvm_us": two.time_ns / 1e3,
                "cpp_s": seconds[2 * i],
                "llvm_s": seconds[2 * i + 1],
                "symbols": [cpp.symbol, llvm.symbol],
            }
        else:
            print(f"{candidate.group.text}: {one} {two}", flush=True)


def compiled_s(kernel: Kernel, builder: Builder) -> float:
    """Compile a kernel; return the seconds."""
    begun_s = time.perf_counter()
    builder.compile([kernel.source])
    return time.perf_counter() - begun_s


def kind_of(candidate: Candidate) -> str:
    """Return the kind of a candidate's computation."""
    body = candidate.group.body
    ops = {primitive.op for primitive in body.primitives}
    categories = {primitive.row.category for primitive in body.primitives}
    if Category.LINEAR in categories:
        return "contractions"
    if any(op.startswith("pool") for op in ops):
        return "windows"
    if ops & {"take", "gather", "pad", "concat", "slice"}:
        return "guarded" if Category.REDUCE not in categories else "guarded reductions"
    if Category.REDUCE in categories:
        return "reductions"
    layouts = {str(layout) for layout in (*candidate.offer.inputs, *candidate.offer.outputs)}
    if "transpose" in ops or len(layouts) > 1:
        return "moves"
    return "elementwise"


def by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each kind."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["kind"]].append(row)
    return found


def quotient(row: Row) -> float:
    """Return C++'s time by LLVM's."""
    return float(row["cpp_us"] / row["llvm_us"])


def mean(rows: Sequence[Row]) -> float:
    """Return the geometric mean of the quotients."""
    return math.exp(sum(math.log(quotient(row)) for row in rows) / len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
