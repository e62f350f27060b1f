"""Two kernels that do not depend on each other: one after the other, side by side, and as tasks.

    python -m benchmarks.pairs [--sizes 256,512,1024] [--threads 1,2] [--seconds 2] [--output FILE.json]

The experiment of a CMU project (15-745) on horizontal fusion, and a product beside a sum. A *balanced* pair is two sums
of N x N numbers, or two products; an *unbalanced* pair is a sum of N numbers beside sigmoid(exp) of N x N, or a product
beside a sum. Ways to run a pair:

- turn: each kernel on all threads, with a join after it;
- fused: both at once, each on half of the threads, as kernels that were made for all threads;
- share: the same, as kernels that were made for half of the threads;
- tasks: each thread has a part of both kernels, and there is no join between them.

All ways run interleaved. More threads than cores say nothing of these ways: threads then wait for cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite import machine
from korch.candidate.candidate import Candidate, Refusal, make_group
from korch.limits import DEFAULT_LIMITS
from korch.measure.compiler import Builder
from korch.measure.toolchain import find_compiler
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.types import DType, ValueType
from korch.provider.concurrent import ConcurrentProvider
from korch.provider.provider import Kernel, Threading, load_providers
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.runtime.library import Handle
from korch.runtime.program import PlanStep
from korch.target import Target, detect_target

PAIRS = ("balanced sums", "balanced products", "unbalanced sum, sigmoid", "unbalanced product, sum")


def graph_of(pair: str, n: int) -> tuple[PrimitiveGraph, list[list[int]]]:
    """Return a pair, and the primitives of each kernel."""
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


def steps_of(graph: PrimitiveGraph, kernels: Sequence[Sequence[int]], target: Target) -> list[PlanStep[Kernel]]:
    """Return the kernels in plain layouts."""
    steps = []
    for own in kernels:
        group = make_group(graph, own, [graph.primitives[own[-1]].output])
        steps.append(next(filter(None, (_step(group, name, target) for name in ("gemm", "generated")))))
    return steps


def _step(group: Any, name: str, target: Target) -> PlanStep[Kernel] | None:
    (provider,) = (p for p in load_providers() if p.name == name)
    offers = provider.offer(group, target)
    for offer in () if isinstance(offers, Refusal) else offers:
        if all(layout.is_plain for layout in (*offer.inputs, *offer.outputs)):
            kernel = provider.build(group, offer, target)
            if isinstance(kernel, Kernel):
                return PlanStep(Candidate(group, name, offer, provider.version), kernel, cost_ns=1e5)
    return None


def ways_of(pair: str, n: int, target: Target) -> dict[str, Executable]:
    """Return an executable for each way."""
    graph, kernels = graph_of(pair, n)
    builder = Builder(target.isa)
    steps = steps_of(graph, kernels, target)
    ways = {"turn": build(graph, steps, target, builder)}
    if target.threads > 1:
        ways["tasks"] = build(graph, steps, target, builder, parts=DEFAULT_LIMITS.task_parts)
        half = target.threads // 2
        concurrent = ConcurrentProvider(load_providers())
        few = steps_of(graph, kernels, replace(target, threads=half))
        lanes = [[step.candidate] for step in few]
        made = concurrent.propose(graph, lanes, target, [half, half])
        if isinstance(made, Refusal):
            raise SystemExit(made.reason)
        share = concurrent.build(made.group, made.offer, target)
        if isinstance(share, Refusal):
            raise SystemExit(share.reason)
        ways["share"] = build(graph, [PlanStep(made, share)], target, builder)
        if (fused := _for_all(share, few, steps)) is not None:
            ways["fused"] = build(graph, [PlanStep(made, fused)], target, builder)
    return {name: Executable(artifact) for name, artifact in ways.items()}


def _for_all(share: Kernel, few: Sequence[PlanStep[Kernel]], steps: Sequence[PlanStep[Kernel]]) -> Kernel | None:
    """Return a kernel of lanes with the parts that were made for all threads; None if these need other memory."""
    source, names = share.source, dict[str, str]()
    for own, other in zip(few, steps, strict=True):
        if own.kernel.workspace_bytes != other.kernel.workspace_bytes:
            return None
        name = names.setdefault(own.kernel.symbol, f"{share.symbol}_{len(names)}")
        text = other.kernel.source.replace(other.kernel.symbol, name)
        source = source.replace(own.kernel.source.replace(own.kernel.symbol, name), text)
        if other.kernel.threading is Threading.TEAM:
            source = source.replace(f"{{{name}_run, nullptr,", f"{{{name}_run, {name}_team,")
    symbol = share.symbol + "_all"
    return replace(share, symbol=symbol, source=source.replace(share.symbol, symbol))


def measure(ways: Mapping[str, Executable], seconds: float) -> dict[str, float]:
    """Return the median times in microseconds, of interleaved runs."""
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
            taken[name] += executable.hooked(arrays, _run_often)
    return {name: float(np.median(times)) / 1e3 for name, times in taken.items()}


def _run_often(handle: Handle, inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """Return the times of some runs in nanoseconds, without what Python does before and after them."""
    found = []
    for _ in range(20):
        begin = time.perf_counter_ns()
        handle.run(inputs, outputs)
        found.append(time.perf_counter_ns() - begin)
    return found


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
        target = detect_target(threads, find_compiler().identity)
        for pair in PAIRS:
            for n in map(int, args.sizes.split(",")):
                times_us = measure(ways_of(pair, n, target), args.seconds)
                rows.append({"pair": pair, "n": n, "threads": threads, "times_us": times_us})
                texts = [f"{name} {time_us:.1f}" for name, time_us in times_us.items()]
                print(f"{pair}, N = {n}, {threads} threads: {', '.join(texts)} us", flush=True)
    if args.output:
        args.output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
