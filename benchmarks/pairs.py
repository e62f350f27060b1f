"""Compares ways to run two independent kernels: one after the other, side by side, and as tasks.

    python -m benchmarks.pairs [--sizes 256,512,1024] [--threads 1,2] [--seconds 2] [--output FILE.json]

It repeats the experiment of a CMU project (15-745) on horizontal fusion, and adds a product with a sum. A *balanced*
pair is two sums of N x N numbers, or two products. An *unbalanced* pair is a sum of N numbers and sigmoid(exp) of
N x N numbers, or a product and a sum. Ways to run a pair:

- turn: each kernel on all threads, with a join after it, in the variant that is fastest on all threads;
- fused: both kernels of `turn` at once, each on half of the threads, although they were made for all threads;
- share: both kernels at once, each made by the search for half of the threads, in the variant that is fastest on them;
- tasks: each thread has a part of both kernels of `turn`, and there is no join between them.

All ways run interleaved. Results with more threads than cores are meaningless, because threads then wait for cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plans import run_times_ns
from benchmarks.suite import machine
from korch.candidate.candidate import Candidate, Group, Offer, Refusal, make_group
from korch.concurrent.lanes import KernelLanes
from korch.limits import DEFAULT_LIMITS
from korch.measure.cpu import CpuMeter
from korch.measure.meter import NEVER, AnyMeter
from korch.options import Options
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.types import DType, ValueType
from korch.provider.concurrent import ConcurrentProvider
from korch.provider.provider import Kernel, Provider, load_providers
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.runtime.program import PlanStep
from korch.search.ledger import Ledger
from korch.target import Target

LIMITS = replace(DEFAULT_LIMITS, concurrent_kernel_ns=10**9)
"""Allows long kernels to run side by side, too."""

PAIRS = ("balanced sums", "balanced products", "unbalanced sum, sigmoid", "unbalanced product, sum")


def graph_of(pair: str, n: int) -> tuple[PrimitiveGraph, list[list[int]]]:
    """Return the graph of a pair, and the numbers of the primitives of each kernel."""
    builder = GraphBuilder()
    square, row = ValueType((n, n), DType.F32), ValueType((n,), DType.F32)

    def both(op: str, type_: ValueType, name: str) -> int:
        operands = [builder.input(f"{name}{i}", type_) for i in range(2)]
        return builder.add(op, operands)

    if pair == "balanced sums":
        outputs = [both("add", square, "x"), both("add", square, "y")]
    elif pair == "balanced products":
        outputs = [both("matmul", square, "x"), both("matmul", square, "y")]
    elif pair == "unbalanced sum, sigmoid":
        power = builder.add("exp", [builder.input("x", square)])
        outputs = [builder.add("sigmoid", [power]), both("add", row, "y")]
    else:
        outputs = [both("matmul", square, "x"), both("add", square, "y")]
    for i, value in enumerate(outputs):
        builder.output(f"o{i}", value)
    graph = builder.freeze()
    last = [next(i for i, p in enumerate(graph.primitives) if p.output == value) for _, value in graph.outputs]
    return graph, [list(range(last[0] + 1)), list(range(last[0] + 1, last[1] + 1))]


def steps_of(graph: PrimitiveGraph, kernels: Sequence[Sequence[int]], ledger: Ledger) -> list[Candidate]:
    """Return the candidate of each kernel that is fastest on all threads, in plain layouts."""
    steps = []
    for own in kernels:
        group = make_group(graph, own, [graph.primitives[own[-1]].output])
        candidates = [c for name in ("gemm", "generated") for c in _candidates(group, name, ledger.meter)]
        ledger.measure(candidates)
        steps.append(min(filter(ledger.is_measured, candidates), key=lambda c: ledger.cost_ns(c)[0]))
    return steps


def _candidates(group: Group, name: str, meter: AnyMeter) -> list[Candidate]:
    (provider,) = (p for p in meter.providers if p.name == name)
    offers = provider.offer(group, meter.target)
    return [
        Candidate(group, name, offer, provider.version)
        for offer in (() if isinstance(offers, Refusal) else offers)
        if all(layout.is_plain for layout in (*offer.inputs, *offer.outputs))
    ]


def ways_of(pair: str, n: int, meter: CpuMeter) -> dict[str, Executable]:
    """Return an executable for each way to run a pair; `turn` alone on one thread."""
    graph, kernels = graph_of(pair, n)
    target, ledger = meter.target, Ledger(meter, LIMITS)
    candidates = steps_of(graph, kernels, ledger)
    steps = [PlanStep(candidate, kernel_of(candidate, meter), cost_ns=1e5) for candidate in candidates]
    ways = {"turn": build(graph, steps, target, meter.builder)}
    if target.threads > 1:
        ways["tasks"] = build(graph, steps, target, meter.builder, parts=DEFAULT_LIMITS.task_parts)
        half = target.threads // 2
        lanes = KernelLanes(graph, candidates, ledger)
        lanes.measure(NEVER)
        tuned = lanes.propose([[0], [1]], [half, half])
        if tuned is None:
            raise SystemExit("the kernels can't run side by side")
        ways["share"] = build(graph, [PlanStep(tuned, kernel_of(tuned, meter))], target, meter.builder)
        ways["fused"] = build(graph, [_fused(graph, candidates, target, half)], target, meter.builder)
    return {name: Executable(artifact) for name, artifact in ways.items()}


def kernel_of(candidate: Candidate, meter: CpuMeter) -> Kernel:
    """Return the kernel of a candidate that was measured or proposed."""
    kernel = meter.kernel(candidate)
    if isinstance(kernel, Refusal):
        raise SystemExit(kernel.reason)
    return kernel


class _OfAll:
    """A provider whose kernels are made for all threads, although they run on fewer."""

    def __init__(self, provider: Provider[Target, Kernel], target: Target) -> None:
        self.name, self.version = provider.name, provider.version
        self._provider, self._target = provider, target

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        return self._provider.offer(group, self._target)

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        return self._provider.build(group, offer, self._target)


def _fused(graph: PrimitiveGraph, candidates: Sequence[Candidate], target: Target, threads: int) -> PlanStep[Kernel]:
    """Return a step with the kernels side by side, each of them made for all threads."""
    concurrent = ConcurrentProvider([_OfAll(provider, target) for provider in load_providers()])
    made = concurrent.propose(graph, [[candidate] for candidate in candidates], target, [threads] * len(candidates))
    kernel = made if isinstance(made, Refusal) else concurrent.build(made.group, made.offer, target)
    if isinstance(made, Refusal) or isinstance(kernel, Refusal):
        raise SystemExit("the kernels can't run side by side")
    return PlanStep(made, kernel)


def measure(ways: Mapping[str, Executable], seconds: float) -> dict[str, float]:
    """Check that all ways agree; return the median times in microseconds of interleaved runs."""
    first = next(iter(ways.values()))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(type_.shape, np.float32) for type_ in first.get_inputs()]
    expected = first(*arrays)
    for executable in ways.values():
        for a, b in zip(expected, executable(*arrays), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, executable in ways.items():
            taken[name] += executable.hooked(arrays, partial(run_times_ns, runs=20))
    return {name: float(np.median(times)) / 1e3 for name, times in taken.items()}


def main() -> None:
    """Measure all pairs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="256,512,1024")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in map(int, args.threads.split(",")):
        with CpuMeter(Options(threads=threads), load_providers()) as meter:
            for pair in PAIRS:
                for n in map(int, args.sizes.split(",")):
                    times_us = measure(ways_of(pair, n, meter), args.seconds)
                    rows.append({"pair": pair, "n": n, "threads": threads, "times_us": times_us})
                    texts = [f"{name} {time_us:.1f}" for name, time_us in times_us.items()]
                    print(f"{pair}, N = {n}, {threads} threads: {', '.join(texts)} us", flush=True)
    if args.output:
        args.output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
