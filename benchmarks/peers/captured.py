"""PyTorch as a peer on CUDA devices, through its usual wrappers and as a captured CUDA graph; how engines are timed.

A wrapper is timed as a user calls it: between two events, with the host's time if the host is slower than the
device. A captured graph, such as Korch's own, is timed on the device alone (`korch.cuda.measure.clock`).
Whatever libraries time while an engine is prepared is timed while no other process uses the lock of the device.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from korch.cuda.measure.clock import elapsed_ms
from korch.cuda.measure.lock import device_lock

CLOCK = "wrappers between events; graphs on the device, behind a sleep"
"""How the rows that this module times were timed; rows without it were timed otherwise."""

ROUNDS = 15
RUNS = 5
"""Runs of an engine in each round."""

WARM_UP = 3

Run = Callable[[], Any]


class Replay:
    """A run of a CUDA graph."""

    def __init__(self, graph: Any, *kept: Any) -> None:
        """Keep what has the graph's memory: the graph itself knows addresses only."""
        self.graph, self.kept = graph, kept

    def __call__(self) -> None:
        """Start the run."""
        self.graph.replay()


def captured(torch: Any, run: Run) -> Replay:
    """Return a replay of the graph of a run; the run must work on fixed memory and must not wait for the device."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    return Replay(graph, run, result)


def peers(torch: Any, module: Any, inputs: list[Any], is_quick: bool) -> dict[str, Callable[[], Run]]:
    """Return functions that prepare PyTorch's engines, by name.

    `is_quick`: without Inductor's search for the fastest kernels.
    """

    def eager() -> Run:
        return lambda: module(*inputs)

    def compiled(mode: str | None) -> Run:
        for tensor in inputs:  # otherwise each run copies the inputs
            torch._dynamo.mark_static_address(tensor)
        run = torch.compile(module, fullgraph=True, mode=mode, dynamic=False)
        with alone_while_timing():
            run(*inputs)
        return lambda: run(*inputs)

    with_graphs, without = ("max-autotune", "max-autotune-no-cudagraphs")
    if is_quick:
        with_graphs, without = "reduce-overhead", None
    return {
        "eager": eager,
        "eager captured": lambda: locked_capture(torch, eager()),
        "torch.compile": lambda: compiled(with_graphs),
        "torch.compile captured": lambda: locked_capture(torch, compiled(without)),
    }


def locked_capture(torch: Any, run: Run) -> Replay:
    """Return `captured` of a run; the lock is held, because cuDNN times its algorithms in first runs."""
    with device_lock():
        return captured(torch, run)


@contextmanager
def alone_while_timing() -> Iterator[None]:
    """Hold the lock while Inductor times kernels, but not while it compiles; always if that can't be told apart."""
    from torch._inductor.runtime import benchmarking

    timer = getattr(benchmarking, "benchmarker", None)
    names = [name for name in ("benchmark_gpu", "benchmark_gpu_with_cuda_graph") if hasattr(timer, name)]

    def held(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            with device_lock():
                return function(*args, **named)

        return timed

    with nullcontext() if names else device_lock():
        for name in names:
            setattr(timer, name, held(getattr(timer, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(timer, name)


def interleaved(torch: Any, runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """Return the milliseconds of one run of each engine, one number for each round, while the device is locked."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    with device_lock():
        for turn in range(ROUNDS + 2):
            for name, run in runs.items():
                run()
                torch.cuda.synchronize()
                found = elapsed_ms(torch, run, RUNS) if isinstance(run, Replay) else _called_ms(torch, run)
                if turn >= 2:
                    times[name].append(found)
    return times


def _called_ms(torch: Any, run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(RUNS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / RUNS
