"""A CUDA device that is not there: tensors lie on the CPU, kernels run in Triton's interpreter, times are made up.

All code that runs on a device runs: calibration, the measuring process, captures, executables. Only an executable's
kernels compute, and only where the results matter: when it is bound to tensors, or replayed with other inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from korch.cuda.compile import Cubin, CubinCompiler, CubinFailure
from korch.cuda.kernel import Launch
from korch.cuda.measure import bulk, device, meter, worker
from korch.cuda.runtime import executable
from korch.measure.record import Failed, Measured, summarize
from tests.support.cuda_issue import Interpreted, Pending, Stream

NAME, ELAPSED_MS = "NVIDIA H200 fake", 5.0
PROPERTIES = SimpleNamespace(
    major=9,
    minor=0,
    name=NAME,
    multi_processor_count=132,
    L2_cache_size=50 << 20,
    shared_memory_per_block_optin=227 << 10,
)


class _Event:
    """An event that is never over; all times are equal."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.elapsed_time: Callable[[Any], float] = lambda end: ELAPSED_MS
        self.record = self.synchronize = self.wait = lambda *_: None
        self.query: Callable[[], bool] = lambda: False


class _Graph:
    """A captured graph."""

    computes = False
    issued: Callable[[], None] | None = None  # runs again what an executable has issued last, if its inputs differ

    def capture_begin(self) -> None:
        """Begin a capture."""
        _Graph.issued = None

    def capture_end(self) -> None:
        """End it."""
        self.again = _Graph.issued

    def replay(self) -> None:
        """Run an executable's kernels if its inputs have changed."""
        if self.again is not None:
            self.again()


@contextmanager
def _computing() -> Iterator[None]:
    """Let kernels compute."""
    _Graph.computes = True
    try:
        yield
    finally:
        _Graph.computes = False


@contextmanager
def _capture(graph: _Graph, **_: Any) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def _stream_context(*_: Any) -> Any:
    return nullcontext()


class _Stream(Stream):
    def wait_stream(self, _: object) -> None:
        """Do nothing: work is done in order."""

    def synchronize(self) -> None:
        """Do nothing."""


def run_in_process(
    jobs: Sequence[Mapping[str, Any]], task: Mapping[str, Any], *_: Any, **__: Any
) -> list[Measured | Failed | None]:
    """Time jobs as `run_jobs` does, but in this process.

    Raises:
        AssertionError: a job failed; on this device that is an error of the code.
    """
    import torch

    samples: list[list[int]] = [[] for _ in jobs]

    def say(**line: Any) -> None:
        assert "failed" not in line, line
        if "sample" in line:
            samples[line["sample"][0]].append(line["sample"][1])

    worker._serve_task(torch, {**task, "jobs": list(jobs)}, say)
    return [summarize(own) for own in samples]


@contextmanager
def fake_cuda(compiles: bool = True) -> Iterator[None]:
    """Let PyTorch and Korch use a CUDA device that is not there; it can run kernels that are compiled meanwhile.

    `compiles`: whether they are compiled indeed; if not, their cubins are empty.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    launches: dict[str, Launch] = {}
    compile_all = CubinCompiler.compile

    def compile_and_keep(self: CubinCompiler, wanted: Sequence[Launch]) -> dict[str, Cubin | CubinFailure]:
        launches.update({launch.symbol: launch for launch in wanted})
        if compiles:
            return compile_all(self, wanted)
        return {launch.symbol: Cubin(launch.symbol, b"\x7fELF", 0, 0, 0) for launch in wanted}

    issue = executable.CudaExecutable._issue

    def issue_and_keep(self: Any, streams: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        seen = [tensor.clone() for tensor in inputs]

        def again() -> None:
            if not all(map(torch.equal, inputs, seen)):
                seen[:] = [tensor.clone() for tensor in inputs]
                with _computing():
                    issue(self, streams, inputs, outputs)

        _Graph.issued = again
        return issue(self, streams, inputs, outputs)

    bind = executable.CudaExecutable.bind

    def bind_and_run(self: Any, *tensors: Any) -> Any:
        with _computing():
            return bind(self, *tensors)

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]
        """Replaces the device in all calls."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == torch.Tensor.is_cuda.__get__:  # of each access an equal one
                return True
            if func is torch.Tensor.cuda:
                return args[0]
            moved = {name: _moved(torch, value) for name, value in (kwargs or {}).items()}
            return func(*(_moved(torch, value) for value in args), **moved)

    class Function(Interpreted):
        """A loaded kernel."""

        def __init__(self, image: bytes, symbol: str, *_: Any) -> None:
            assert image.startswith(b"\x7fELF"), symbol
            super().__init__(launches[symbol], Pending((0, 1 << 64)))

        def launch(self, programs: int, pointers: Sequence[int], stream: int, is_early: bool = False) -> None:
            """Run the kernel, if kernels compute now."""
            assert len(pointers) == len(self.interpreted.signature)
            if _Graph.computes:
                super().launch(programs, pointers, stream)
                self.pending.end()

        def unload(self) -> None:
            """Do nothing."""

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: NAME,
        "Stream": _Stream,
        "stream": _stream_context,
        "current_stream": _Stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": _capture,
        "_sleep": lambda cycles: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(executable.CudaExecutable, "_issue", issue_and_keep))
        stack.enter_context(patch.object(executable.CudaExecutable, "bind", bind_and_run))
        stack.enter_context(patch.object(CubinCompiler, "compile", compile_and_keep))
        for name, value in replaced.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True))
        stack.enter_context(patch.object(torch, "compile", lambda module, **_: module))
        stack.enter_context(patch.object(device, "has_driver", lambda: True))
        stack.enter_context(patch.object(device, "COPY_BYTES", 1 << 20))
        stack.enter_context(patch.object(device, "SIDES", (64, 64)))
        for module in (bulk, meter):
            stack.enter_context(patch.object(module, "run_jobs", run_in_process))
        for module in (worker, executable):
            stack.enter_context(patch.object(module, "CudaFunction", Function))
        stack.enter_context(OnCpu())
        yield


def _moved(torch: Any, value: Any) -> Any:
    is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or value == "cuda"
    return torch.device("cpu") if is_cuda else value
