"""Program -> a callable that runs one CUDA graph.

All launches are captured once, into one graph over fixed memory: an arena, the weights, and a
buffer for each input and output. A call copies its inputs into these buffers, replays the graph and
copies the outputs out of their buffers. `bind` returns a run over the caller's own tensors, without copies.
A run allocates no memory and does not wait for the device.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Self

import numpy as np

from korch.cuda.driver import CudaFunction
from korch.cuda.engine import TensorRtEngine, check_maker, maker
from korch.cuda.flags import library_flags
from korch.cuda.kernel import POINTER_ALIGNMENT
from korch.cuda.measure.clock import elapsed_ms
from korch.cuda.measure.device import require_torch
from korch.cuda.measure.lock import device_lock
from korch.cuda.module import load_call
from korch.cuda.runtime.early import EARLIEST_ARCH
from korch.cuda.runtime.memory import StepMemory, bytes_of
from korch.cuda.runtime.recompile import cubins_for
from korch.cuda.runtime.record import CudaProgram, StepProgram, archive_of, read_program
from korch.cuda.runtime.schedule import STREAMS, Turn, early_launches, in_order, schedule
from korch.errors import InputError, UnsupportedError
from korch.primitive.types import DType
from korch.runtime.artifact import Archive
from korch.runtime.record import PlanRecord, TensorRecord
from korch.runtime.report import Report
from korch.runtime.runnable import PlanExecutable

logger = logging.getLogger("korch.cuda")

REPLAYS = 4
"""The replays of which one time is the mean."""

SCHEDULE_ROUNDS = 9
"""Rounds in which graphs with two schedules are timed in turn."""

SCHEDULE_ERROR = 1e-2
"""How much results may differ between schedules, relative to the largest element."""


@dataclass(frozen=True, eq=False)
class Bound:
    """A run over fixed tensors.

    All runs of one executable share its memory, so the caller must order runs on different streams.
    """

    inputs: tuple[Any, ...]  # the tensors that it reads, in the model's order
    outputs: tuple[Any, ...]  # the tensors that it writes
    graph: Any  # the CUDA graph; it refers to its memory by addresses only
    kept: tuple[Any, ...]  # objects that must live as long as the graph

    def replay(self) -> None:
        """Start a run of the model on the current stream, without waiting for it."""
        self.graph.replay()


class CudaExecutable(PlanExecutable):
    """A plan that runs on a CUDA device; call it with tensors or arrays.

    It may be called from several threads; the calls wait for each other.
    """

    def __init__(self, program: CudaProgram) -> None:
        """Load the kernels, copy the weights to the device, capture the graph.

        Raises:
            UnsupportedError: there is no device, or the program does not run on it.
        """
        torch = self._torch = require_torch()
        self._program = program
        self._lock = threading.Lock()
        major, minor = torch.cuda.get_device_capability(0)
        images = cubins_for(program, 10 * major + minor)
        launches = program.launches
        self._functions: dict[str, Any] = {
            symbol: CudaFunction(image.image, symbol, image.shared_bytes, launch.warps)
            for symbol, image in images.items()
            for launch in (launches[symbol],)
        }
        calls = {step.call for step in program.steps if step.call}
        self._calls = {symbol: load_call(symbol, program.sources[symbol]) for symbol in calls}
        self._engines = open_engines(program, 10 * major + minor, torch)
        self._arena = torch.empty(max(1, program.plan.arena_bytes), dtype=torch.uint8, device="cuda")
        self._weights = torch.from_numpy(program.weights.block).to("cuda")
        self._tables = [torch.tensor(t, dtype=torch.int32, device="cuda") for t in program.tables]
        self._turns: tuple[Turn, ...] = schedule(program.steps) if program.is_parallel else in_order(program.steps)
        self.schedules_ns: dict[str, int] = {}  # when it was built: the time of a run with each schedule compared
        self._is_early = program.is_early and 10 * major + minor >= EARLIEST_ARCH
        self._own = self._bind(self._allocate("inputs"), self._allocate("outputs"))
        self._done = torch.cuda.Event()

    @property
    def plan(self) -> PlanRecord:
        """The plan: its kernels in order, and all other facts recorded about it."""
        return self._program.plan

    @property
    def report(self) -> Report:
        """How the plan was found; `save` stores it."""
        return self._program.report

    @report.setter
    def report(self, report: Report) -> None:
        self._program = replace(self._program, report=report)

    @property
    def sources(self) -> Mapping[str, str]:
        """The sources by symbol."""
        return self._program.sources

    @property
    def schedule(self) -> str:
        """How its kernels overlap: on branches of the graph, by an early begin, both, or not at all."""
        names = ["branches"] * self._program.is_parallel + ["early"] * self._is_early
        return " ".join(names) or "in order"

    def compute(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Run the model on the current stream.

        `arrays`: one for each input: PyTorch tensors, NumPy arrays, or objects that support DLPack.

        Returns:
            A tensor on the device for each output; if all inputs are NumPy arrays, NumPy arrays.
        """
        torch = self._torch
        given = self._accept(arrays)
        with self._lock:
            self._done.wait()  # the previous run may still be running on another stream
            for own, tensor in zip(self._own.inputs, given, strict=True):
                own.copy_(tensor, non_blocking=True)
            self._own.replay()
            outputs = tuple(tensor.clone() for tensor in self._own.outputs)
            self._done.record()
        if arrays and all(isinstance(array, np.ndarray | np.generic) for array in arrays):
            return tuple(_to_numpy(torch, o, info.dtype) for o, info in zip(outputs, self.get_outputs(), strict=True))
        return outputs

    def bind(self, inputs: Sequence[Any] | None = None, outputs: Sequence[Any] | None = None) -> Bound:
        """Return a run over the caller's tensors, without copies.

        `inputs`: dense tensors on the device, aligned to 16 bytes; None for new ones. An output may not share memory
        with another tensor.

        Raises:
            InputError: there are too few or too many tensors; a tensor has another shape or type, or is not dense,
                aligned and on the device; or an output shares memory.
        """
        sides, named = [], []
        for name, tensors in (("inputs", inputs), ("outputs", outputs)):
            wanted = self._allocate(name) if tensors is None else list(tensors)
            records = getattr(self.plan, name)
            if len(wanted) != len(records):
                raise InputError(f"{len(wanted)} tensors are given", where=name, expected=str(len(records)))
            for tensor, record in zip(wanted, records, strict=True):
                is_fit = tensor.is_cuda and tensor.is_contiguous() and tensor.data_ptr() % POINTER_ALIGNMENT == 0
                self._check(tensor, record, name[:-1], is_fit, ", dense, aligned and on the device")
                named.append((f"{name[:-1]} {record.name!r}", tensor))
            sides.append(wanted)
        _check_apart(named, len(sides[0]))
        with self._lock:
            return self._bind(*sides)

    def stopwatch(self, arrays: Sequence[Any]) -> Callable[[], int]:
        """Return a function that runs the model and returns the nanoseconds of a run on the device."""
        for own, tensor in zip(self._own.inputs, self._accept(arrays), strict=True):
            own.copy_(tensor)
        return self._clock()

    def _clock(self) -> Callable[[], int]:
        """Return a function that runs the model on the current content of its inputs, and returns the time of a run.

        No other process times kernels meanwhile.
        """

        def once() -> int:
            with device_lock():
                self._own.replay()  # not timed: another process may have replaced what the caches held
                return int(1e6 * elapsed_ms(self._torch, self._own.replay, REPLAYS))

        return once

    def archive(self) -> Archive:
        """Return the content of its file."""
        return archive_of(self._program)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | IO[bytes]) -> Self:
        """Load an artifact for a CUDA device.

        Raises:
            ArtifactError: it can't be read, or is damaged.
            UnsupportedError: there is no device, or the artifact does not run on it.
        """
        return cls(read_program(path))

    # Memory

    def _allocate(self, side: str) -> list[Any]:
        torch = self._torch
        return [
            torch.zeros(record.shape, dtype=getattr(torch, _torch_name(record.dtype)), device="cuda")
            for record in getattr(self.plan, side)
        ]

    def _accept(self, arrays: Sequence[Any]) -> list[Any]:
        torch = self._torch
        found = []
        for array, record in zip(self.complete(arrays), self.plan.inputs, strict=True):
            tensor = array
            if isinstance(array, np.ndarray | np.generic):
                tensor = _from_numpy(torch, np.asarray(array), record.dtype)
            elif not isinstance(array, torch.Tensor):
                tensor = torch.from_dlpack(array)
            self._check(tensor, record, "input")
            found.append(tensor)
        return found

    def _check(self, tensor: Any, record: TensorRecord, kind: str, is_fit: bool = True, needs: str = "") -> None:
        """Raise `InputError` unless a tensor has the type of a record, and meets further needs."""
        dtype = getattr(self._torch, _torch_name(record.dtype))
        if not is_fit or tuple(tensor.shape) != record.shape or tensor.dtype != dtype:
            raise InputError(
                f"it is {tensor.dtype}{list(tensor.shape)} on {tensor.device}",
                where=f"{kind} {record.name!r}",
                expected=f"{dtype}{list(record.shape)}{needs}",
            )

    def _bind(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Bound:
        """Capture the graph over some tensors."""
        torch = self._torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with library_flags(torch, self._program.allow_tf32), torch.no_grad():
            with torch.cuda.stream(stream):
                self._issue([stream] * STREAMS, inputs, outputs)  # a first run, in which the libraries initialize
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            streams = [stream, *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
            # cuBLAS keeps one workspace for each stream. The graph's workspace must be allocated in the graph's
            # own pool, and must be used by the graph only: clearing workspaces later would free it.
            torch._C._cuda_clearCublasWorkspaces()
            # "thread_local": other threads may allocate memory during the capture.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                results = self._issue(streams, inputs, outputs)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.synchronize()
        kept = (self._functions, self._calls, self._engines, self._arena, self._weights, self._tables)
        return Bound(tuple(inputs), tuple(outputs), graph, (*kept, results))

    def _issue(self, streams: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Issue all steps, each on its stream; return the memory that calls have allocated."""
        torch = self._torch
        main = streams[0]
        joined = {main}
        events: dict[int, Any] = {}
        wanted = {wait for turn in self._turns for wait in turn.waits}
        early = early_launches(self._program.steps, self._turns)
        memory = StepMemory(torch, self._program, (self._arena, self._weights, self._tables), inputs, outputs)
        for number, (step, turn) in enumerate(zip(self._program.steps, self._turns, strict=True)):
            stream = streams[turn.stream]
            if stream not in joined:  # a branch begins at the capture's stream
                joined.add(stream)
                stream.wait_event(main.record_event())
            for wait in turn.waits:
                stream.wait_event(events[wait])
            with torch.cuda.stream(stream):
                if step.call:
                    arguments = [memory.tensor(place) for place in step.buffers[: step.inputs]]
                    results = self._calls[step.call](torch, *arguments)
                    written = step.buffers[step.inputs : step.inputs + step.outputs]
                    for place, result in zip(written, results, strict=True):
                        memory.put(place, result)
                elif step.engine:
                    memory.forget(step.buffers[step.inputs :])
                    flat = [memory.flat(step.buffers[i]) for i in _open_buffers(step)]
                    memory.kept += self._engines[number].run(flat, len(flat) - step.outputs, stream.cuda_stream)
                else:
                    memory.forget(step.buffers[step.inputs :])
                pointers = [[memory.address(step.buffers[i]) for i in la.arguments] for la in step.launches]
                for launch, own, may in zip(step.launches, pointers, early[number], strict=True):
                    self._functions[launch.symbol].launch(launch.grid, own, stream.cuda_stream, self._is_early and may)
            if number in wanted:
                events[number] = stream.record_event()
        for stream in joined - {main}:
            main.wait_event(stream.record_event())
        with torch.cuda.stream(main):
            for output, place in self._program.copies:
                bytes_of(torch, outputs[output]).copy_(memory.flat(place))
        return memory.kept


def open_engines(program: CudaProgram, arch: int, torch: Any) -> dict[int, TensorRtEngine]:
    """Load a program's engines: each step with an engine has its own instance, with its own scratch memory.

    Raises:
        UnsupportedError: the engines were built by another version of TensorRT or for another device, or there
            is no TensorRT here.
    """
    if not program.engines:
        return {}
    try:
        here = maker(torch.cuda.get_device_name(0), arch)
    except ImportError:
        here = "no TensorRT"
    check_maker(program.engine_maker, here)
    return {
        number: TensorRtEngine(
            program.engines[step.engine],
            [f"i{i}" if i < step.inputs else f"o{i - step.inputs}" for i in _open_buffers(step)],
        )
        for number, step in enumerate(program.steps)
        if step.engine
    }


def _check_apart(named: Sequence[tuple[str, Any]], inputs: int) -> None:
    """Raise `InputError` if a tensor after the first `inputs` shares memory with a tensor before it."""
    for number, (output, b) in enumerate(named[inputs:], inputs):
        for other, a in named[:number]:
            if a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes:
                raise InputError(f"it shares memory with {other}", where=output, expected="memory of its own")


def _open_buffers(step: StepProgram) -> list[int]:
    """Return the buffers that are passed to an engine: its inputs except weights, and its outputs."""
    return [i for i in range(step.inputs + step.outputs) if i not in step.known]


def with_best_schedule(program: CudaProgram, early: CudaProgram | None = None) -> CudaExecutable:
    """Return an executable in which independent kernels run concurrently, and kernels begin early, if that is faster.

    `early`: the program with kernels that begin early; None if there is none.

    Raises:
        UnsupportedError: there is no device, or the program does not run on it.
    """
    with device_lock():  # libraries time kernels when a graph is captured
        best = CudaExecutable(replace(program, is_parallel=False))
        if any(turn.stream for turn in schedule(program.steps)):
            best = _faster(best, replace(program, is_parallel=True))
        if early is not None:
            best = _faster(best, replace(early, is_parallel=best._program.is_parallel))
    return best


def _faster(one: CudaExecutable, program: CudaProgram) -> CudaExecutable:
    """Return an executable of a program if it is faster than another one and computes the same, else the other one."""
    try:
        other = CudaExecutable(program)
    except (UnsupportedError, RuntimeError) as error:  # an older driver can't capture kernels that begin early
        logger.warning("a schedule is not tried: %s", error)
        return one
    use_equal_inputs(one._own, other._own)
    clocks = [one._clock(), other._clock()]
    medians = np.median([[clock() for clock in clocks] for _ in range(SCHEDULE_ROUNDS)], axis=0)
    best = other if medians[1] < medians[0] else one
    if best is other and not agree(one._own, other._own):
        logger.warning("kernels that run %s compute something else than before; please report it", other.schedule)
        return one
    names = one.schedule, other.schedule
    best.schedules_ns = one.schedules_ns | dict(zip(names, map(int, medians), strict=True))
    return best


def use_equal_inputs(a: Bound, b: Bound) -> None:
    """Give two runs the same inputs: random floats, and other numbers as they are in the first one."""
    for own, other in zip(a.inputs, b.inputs, strict=True):
        if own.is_floating_point():
            own.normal_()
        other.copy_(own)


def agree(a: Bound, b: Bound) -> bool:
    """Return whether the last results of two runs differ by less than libraries' choice of algorithms explains."""
    pairs = [(x.double(), y.double()) for x, y in zip(a.outputs, b.outputs, strict=True)]
    limits = [SCHEDULE_ERROR * float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0 for x, _ in pairs]
    return all(x.allclose(y, 0.0, limit, equal_nan=True) for (x, y), limit in zip(pairs, limits, strict=True))


def _torch_name(dtype: str) -> str:
    return DType(dtype).numpy.name


def _from_numpy(torch: Any, array: Any, dtype: str) -> Any:
    dense = np.asarray(array, order="C")
    if not dense.flags.writeable:  # PyTorch does not support read-only tensors
        dense = dense.copy()
    if dtype == "bf16" and dense.dtype.itemsize == 2 and dense.dtype.name == "bfloat16":
        return torch.from_numpy(dense.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(dense)


def _to_numpy(torch: Any, tensor: Any, dtype: np.dtype[Any]) -> Any:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).cpu().numpy().view(dtype)
    return tensor.cpu().numpy()
