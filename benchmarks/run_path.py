"""Measures the time that a run needs outside of its kernels, with a chain of almost empty kernels.

    python -m benchmarks.run_path [KERNELS]

It prints nanoseconds per run and per kernel, for calls of the native library and for calls of the
executable in Python. The goal is less than 1000 ns per kernel.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from korch.candidate.candidate import Candidate, Offer, make_group
from korch.candidate.layout import Layout
from korch.measure.compiler import Builder
from korch.primitive.graph import GraphBuilder
from korch.primitive.types import ValueType
from korch.provider.provider import Kernel
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.runtime.program import PlanStep
from korch.target import Target

REPEATS = 2000
SOURCE = """extern "C" int k_{op}_run(void *, void *const *buffers) {{
    *(float *)buffers[1] = -*(const float *)buffers[0];
    return 0;
}}
"""


def make_chain(kernels: int, folder: Path) -> Executable:
    """Return an executable with `kernels` kernels, each of which computes one element."""
    grown = GraphBuilder()
    value = grown.input("x", ValueType.parse("f32[1]"))
    for i in range(kernels):
        value = grown.add("abs" if i % 2 else "neg", [value])
    grown.output("y", value)
    graph = grown.freeze()
    plain = (Layout.plain(1),)
    steps = []
    for p, primitive in enumerate(graph.primitives):
        group = make_group(graph, [p], [primitive.output])
        kernel = Kernel(f"k_{primitive.op}", SOURCE.format(op=primitive.op))
        steps.append(PlanStep(Candidate(group, "chain", Offer(plain, plain)), kernel))
    return Executable(build(graph, steps, Target(isa="generic"), Builder("generic", folder)))


def fastest_ns(call: Callable[[], object]) -> float:
    """Return the mean time of a call, in nanoseconds, in the fastest of nine rounds."""
    rounds = []
    for _ in range(9):
        start = time.perf_counter_ns()
        for _ in range(REPEATS):
            call()
        rounds.append((time.perf_counter_ns() - start) / REPEATS)
    return min(rounds)


def main() -> None:
    """Measure the runs of a chain and print the times."""
    kernels = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder:
        executable = make_chain(kernels, Path(folder))
    x, y = np.ones(1, np.float32), np.ones(1, np.float32)
    run, handle = executable._handle._run, executable._handle._handle
    inputs = (ctypes.c_void_p * 1)(x.ctypes.data)
    outputs = (ctypes.c_void_p * 1)(y.ctypes.data)
    for name, call in (("native", lambda: run(handle, inputs, outputs)), ("python", lambda: executable(x))):
        total_ns = fastest_ns(call)
        print(f"{name}: {total_ns:8.0f} ns a run, {total_ns / kernels:6.1f} ns a kernel")


if __name__ == "__main__":
    main()
