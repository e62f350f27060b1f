"""The measuring process of a CUDA device: times kernels; its caller survives if it crashes or hangs.

It uses the protocol of `korch.measure.worker`, but handles one task after another, because importing PyTorch and
opening the device take seconds. A task is a JSON line from stdin; answers are JSON lines to stdout.
Many runs of a kernel are captured in a CUDA graph, which is replayed behind a sleep of the device, so that the times
include neither Python nor the driver. Values that other kernels write before this one are in the L2 cache, if they fit.
Weights are not, since a model has more of them: consecutive runs use different copies of the weights.

Little is done per kernel, so that many can be measured in a short time: the number of runs follows from the estimate
of the time, the jobs of a task share memory, and PyTorch's context manager for captures, which frees all unused
memory, is not used.
"""

import base64
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from korch.cuda.driver import CudaFunction
from korch.cuda.engine import TensorRtEngine, build_engine
from korch.cuda.flags import library_flags
from korch.cuda.kernel import ALIGNMENT
from korch.cuda.layout import strided
from korch.cuda.measure.clock import elapsed_ms
from korch.cuda.module import load_call
from korch.cuda.network import with_constants
from korch.errors import excerpt
from korch.primitive.torch_calls.node import TORCH_TYPES
from korch.primitive.types import DType

SAMPLES = 9
SAMPLE_MS = 0.25
"""The total time of the runs of one sample."""

NEAR = 3.0
"""A sample whose time differs from `SAMPLE_MS` by a larger factor is taken again, with another number of runs."""

MOST_RUNS = 400
MOST_ENGINES = 32
"""The most copies of an engine, which contains its weights and takes a while to load."""

MOST_BYTES = 8 << 30
LEAST_BYTES = 64 << 20
"""The least memory that is allocated at a time."""


def serve() -> None:
    """Read tasks, time their kernels, and write the results."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def say(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    for text in iter(sys.stdin.readline, ""):
        task = json.loads(text)
        try:
            import torch

            torch.zeros(1, device="cuda")
        except Exception as error:  # noqa: BLE001 - whatever it is, there is no device
            say(unready=excerpt(error))
            return
        _serve_task(torch, task, say)
        torch.cuda.empty_cache()  # the executable's process needs the memory
        say(done=True)


def _serve_task(torch: Any, task: dict[str, Any], say: Callable[..., None]) -> None:
    memory = JobMemory(torch)
    for number, job in enumerate(task["jobs"]):
        say(at=number)
        try:
            with library_flags(torch, job["allow_tf32"]), torch.no_grad(), ExitStack() as loaded:
                for sample in _time(memory, job, task["l2_bytes"], loaded):
                    say(sample=[number, sample])
        except Exception as error:  # noqa: BLE001 - one kernel's failure is not the others'
            say(failed=[number, "failed", excerpt(error)])
            if not _is_sound(torch):
                os._exit(1)  # another process continues with the others


def _is_sound(torch: Any) -> bool:
    """Return whether the device still works: an invalid address ends all work of a process."""
    try:
        torch.cuda.synchronize()
        return bool(torch.zeros(1, device="cuda").add_(1.0).item() == 1.0)
    except Exception:  # noqa: BLE001 - whatever it is, it does not
        return False


class JobMemory:
    """The device memory of a task: each job takes it from the beginning again, so that few jobs allocate any.

    What a kernel reads is random floats in [0.5, 1) or zeros; scratch memory is zeros.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._blocks: dict[tuple[bool, str], Any] = {}
        self._used: dict[tuple[bool, str], int] = {}

    def begin(self) -> None:
        """Begin a job: the memory of the one before may be taken again."""
        self._used.clear()

    def take(self, spec: dict[str, Any]) -> Any:
        """Return a flat tensor for a buffer of a job."""
        torch, is_read = self.torch, spec["kind"] in ("constant", "input")
        if spec["kind"] == "table":
            return torch.tensor(spec["table"], dtype=torch.int32, device="cuda")
        kind = getattr(torch, TORCH_TYPES[spec["dtype"]])
        width = torch.empty(0, dtype=kind).element_size()
        size, step = max(1, spec["bytes"] // width), -(-max(1, spec["bytes"]) // ALIGNMENT) * ALIGNMENT // width
        place = (is_read, spec["dtype"])
        at, block = self._used.get(place, 0), self._blocks.get(place)
        if block is None or at + step > len(block):
            at, room = 0, max(step, LEAST_BYTES // width)
            block = torch.zeros(room, dtype=kind, device="cuda")
            if is_read and kind.is_floating_point:
                block = (torch.rand(room, device="cuda") * 0.5 + 0.5).to(kind)
            self._blocks[place] = block
        self._used[place] = at + step
        part = block[at : at + size]
        return part.zero_() if spec["kind"] == "scratch" else part


def _time(memory: JobMemory, job: dict[str, Any], l2_bytes: int, loaded: ExitStack) -> Sequence[int]:
    """Return samples of the nanoseconds of one run; `loaded` unloads the kernel's cubins at its end."""
    torch = memory.torch
    turns, copies = _turns(job, l2_bytes)
    make = _maker(torch, job, loaded)
    memory.begin()
    made: dict[tuple[int, int], Any] = {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runs = [make(_buffers(memory, job, 0, copies, made), stream)]
        runs[0]()
        stream.synchronize()

        def capture(count: int) -> tuple[Any, int]:
            """Return a graph of some runs, and the number of runs that its time suggests."""
            while len(runs) < min(turns, count):
                runs.append(make(_buffers(memory, job, len(runs), copies, made), stream))
                if not job["launches"]:  # libraries and engines prepare themselves in a first run
                    runs[-1]()
            graph = _graph(torch, itertools.islice(itertools.cycle(runs), count))
            graph.replay()
            return graph, _runs(elapsed_ms(torch, graph.replay) / count, turns)

        count = _runs(1e-6 * job.get("guess_ns", 0) or SAMPLE_MS, turns)
        graph, wanted = capture(count)
        if not 1 / NEAR <= wanted / count <= NEAR:
            count = wanted
            graph, _ = capture(count)
        return [max(1, int(1e6 * elapsed_ms(torch, graph.replay) / count)) for _ in range(SAMPLES)]


def _runs(once_ms: float, turns: int) -> int:
    """Return how many runs one sample has, if a run takes `once_ms`; at least each of three buffer sets is used."""
    return min(MOST_RUNS, max(min(3, turns), int(SAMPLE_MS / max(once_ms, 1e-3)) + 1))


def _graph(torch: Any, runs: Iterable[Callable[[], None]]) -> Any:
    """Return a graph of runs, captured on the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for run in runs:
            run()
    finally:
        graph.capture_end()
    return graph


def _turns(job: dict[str, Any], l2_bytes: int) -> tuple[int, int]:
    """Return the number of buffer sets that runs use in turn, and the number of copies of buffers other than weights.

    All copies of the weights together are twice as large as the L2 cache. The other buffers have one copy
    if they fit into half of the cache, else three.
    """
    specs = job["buffers"]
    weights = sum(spec["bytes"] for spec in specs if spec["kind"] == "constant")
    others = sum(spec["bytes"] for spec in specs) - weights
    copies = 1 if others <= l2_bytes // 2 else 3
    turns = max(copies, -(-2 * l2_bytes // weights) if weights else 1)
    room = (MOST_BYTES - others * copies) // max(1, weights)
    most = MOST_ENGINES if job.get("network") else MOST_RUNS
    return max(1, min(turns, most, room)), copies


def _buffers(
    memory: JobMemory, job: dict[str, Any], turn: int, copies: int, made: dict[tuple[int, int], Any]
) -> list[Any]:
    """Return the buffer set of a turn; buffers that several sets share are created once."""
    buffers = []
    for position, spec in enumerate(job["buffers"]):
        own = turn if spec["kind"] == "constant" else turn % copies
        if (position, own) not in made:
            made[position, own] = memory.take(spec)
        buffers.append(made[position, own])
    return buffers


Make = Callable[[list[Any], Any], Callable[[], None]]
"""Function: buffers and a stream -> a function that runs the kernel on them."""


def _maker(torch: Any, job: dict[str, Any], loaded: ExitStack) -> Make:
    """Load a kernel once; return a function that makes runs of it on given buffers."""
    if job["network"]:
        return _engine_maker(job)
    return _call_maker(torch, job) if job["call"] else _launch_maker(job, loaded)


def _engine_maker(job: dict[str, Any]) -> Make:
    """Build an engine with random weights; each buffer set gets a separate copy of the engine."""
    known, specs = job["network"]["known"], job["buffers"]
    rng = np.random.default_rng(0)
    constants = {
        f"i{i}": (rng.random(specs[i]["shape"]) * 0.5 + 0.5).astype(DType(specs[i]["dtype"]).numpy) for i in known
    }
    model = onnx.ModelProto.FromString(base64.b64decode(job["network"]["model"]))
    image = build_engine(with_constants(model, constants).SerializeToString(), job["allow_tf32"])
    inputs = sum(spec["kind"] in ("constant", "input") for spec in specs)
    given = [i for i in range(len(specs)) if i not in known]
    names = [f"i{i}" if i < inputs else f"o{i - inputs}" for i in given]

    def make(buffers: list[Any], stream: Any) -> Callable[[], None]:
        engine = TensorRtEngine(image, names)
        tensors = [buffers[i] for i in given]

        def run() -> None:
            engine.run(tensors, inputs - len(known), stream.cuda_stream)

        return run

    return make


def _call_maker(torch: Any, job: dict[str, Any]) -> Make:
    function = load_call(job["call"]["symbol"], job["call"]["source"])

    def make(buffers: list[Any], stream: Any) -> Callable[[], None]:
        inputs = [
            strided(buffer, spec["shape"], spec["layout"])
            for buffer, spec in zip(buffers, job["buffers"], strict=True)
            if spec["kind"] in ("constant", "input")
        ]

        def run() -> None:
            function(torch, *inputs)

        return run

    return make


def _launch_maker(job: dict[str, Any], loaded: ExitStack) -> Make:
    functions = []
    for step in job["launches"]:
        image = Path(step["path"]).read_bytes()
        functions.append(CudaFunction(image, step["symbol"], step["shared_bytes"], step["warps"]))
        loaded.callback(functions[-1].unload)

    def make(buffers: list[Any], stream: Any) -> Callable[[], None]:
        pointers = [buffer.data_ptr() for buffer in buffers]
        launches = []
        for function, step in zip(functions, job["launches"], strict=True):
            launches.append((function, step["programs"], [pointers[i] for i in step["arguments"]]))

        def run() -> None:
            for function, programs, arguments in launches:
                function.launch(programs, arguments, stream.cuda_stream)

        return run

    return make
