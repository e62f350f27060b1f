"""The measuring process of a CUDA device: times kernels, and may crash or hang without harm.

It speaks as `korch.measure.worker` does: one task as a JSON line from stdin, JSON lines to stdout.
A kernel is captured in a graph of many runs and the graph is replayed, so that neither Python nor
the driver is in the times. What other kernels write before this one runs is found in the level-2
cache, if it fits; weights are not: a model has more of them, so the runs take turns with copies.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from korch.cuda.driver import Function
from korch.cuda.layout import TORCH_TYPES, strided
from korch.cuda.module import load_call

SAMPLES = 9
SAMPLE_MS = 0.5
"""A sample is as many runs as take this long together."""

MOST_RUNS = 400
MOST_COPIES = 32
MOST_BYTES = 8 << 30


def serve() -> None:
    """Read a task, time its kernels, write what is found."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    task = json.loads(sys.stdin.readline())
    try:
        import torch

        torch.zeros(1, device="cuda")
        torch.backends.cuda.matmul.allow_tf32 = task["allow_tf32"]
        torch.backends.cudnn.allow_tf32 = task["allow_tf32"]
        torch.backends.cudnn.benchmark = True
    except Exception as error:  # noqa: BLE001 - whatever it is, there is no device
        say(unready=str(error)[:300])
        return
    for number, job in enumerate(task["jobs"]):
        say(at=number)
        try:
            for sample in _time(torch, job, task["l2_bytes"]):
                say(sample=[number, sample])
        except Exception as error:  # noqa: BLE001 - one kernel's failure is not the others'
            say(failed=[number, "failed", str(error).strip()[:300] or type(error).__name__])
    say(done=True)


def _time(torch: Any, job: dict[str, Any], l2_bytes: int) -> Sequence[int]:
    """Return nanoseconds of one run, several times."""
    sets = _buffers(torch, job, l2_bytes)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        runs = [_runner(torch, job, buffers, stream) for buffers in sets]
        for run in runs:
            run()
        stream.synchronize()
        once_ms = max(_elapsed(torch, stream, lambda: _all(runs)) / len(runs), 1e-3)
    count = min(MOST_RUNS, max(len(runs), int(SAMPLE_MS / once_ms) + 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), torch.no_grad():
        for run in itertools.islice(itertools.cycle(runs), count):
            run()
    with torch.cuda.stream(stream):
        graph.replay()
        found = [int(1e6 * _elapsed(torch, stream, graph.replay) / count) for _ in range(SAMPLES)]
    return [max(1, sample) for sample in found]


def _all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


def _elapsed(torch: Any, stream: Any, run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end))


def _buffers(torch: Any, job: dict[str, Any], l2_bytes: int) -> list[list[Any]]:
    """Return sets of buffers that runs take turns with."""
    specs = job["buffers"]
    weights = sum(spec["bytes"] for spec in specs if spec["kind"] == "constant")
    others = sum(spec["bytes"] for spec in specs) - weights
    copies = 1 if others <= l2_bytes // 2 else 3
    turns = min(MOST_COPIES, max(copies, -(-2 * l2_bytes // max(1, weights)) if weights else 1))
    turns = max(1, min(turns, MOST_BYTES // max(1, weights + others * copies)))
    made: dict[tuple[int, int], Any] = {}
    sets = []
    for turn in range(turns):
        buffers = []
        for position, spec in enumerate(specs):
            own = turn if spec["kind"] == "constant" else turn % copies
            if (position, own) not in made:
                made[position, own] = _buffer(torch, spec)
            buffers.append(made[position, own])
        sets.append(buffers)
    return sets


def _buffer(torch: Any, spec: dict[str, Any]) -> Any:
    """Return memory with what it should hold: a table, floats around 1, or zeros."""
    if spec["kind"] == "table":
        return torch.tensor(spec["table"], dtype=torch.int32, device="cuda")
    kind = getattr(torch, TORCH_TYPES[spec["dtype"]])
    size = max(1, spec["bytes"] // torch.empty(0, dtype=kind).element_size())
    if kind.is_floating_point and spec["kind"] != "scratch":
        return (torch.rand(size, device="cuda") * 0.5 + 0.5).to(kind)
    return torch.zeros(size, dtype=kind, device="cuda")


def _runner(torch: Any, job: dict[str, Any], buffers: list[Any], stream: Any
            ) -> Callable[[], None]:  # fmt: skip
    if job["call"]:
        function = load_call(job["call"]["symbol"], job["call"]["source"])
        inputs = [
            strided(buffer, spec["shape"], spec["layout"])
            for buffer, spec in zip(buffers, job["buffers"], strict=True)
            if spec["kind"] in ("constant", "input")
        ]
        return lambda: function(torch, *inputs) and None
    pointers = [buffer.data_ptr() for buffer in buffers]
    launches = [
        (Function(Path(step["path"]).read_bytes(), step["symbol"], step["shared_bytes"],
                  step["warps"]), step["grid"], [pointers[i] for i in step["arguments"]])
        for step in job["launches"]
    ]  # fmt: skip

    def run() -> None:
        for function, grid, arguments in launches:
            function.launch(grid, arguments, stream.cuda_stream)

    return run
