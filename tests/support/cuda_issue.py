"""Runs a CUDA executable's program on the CPU, to test its memory, its calls of PyTorch and its copies.

Launches run in Triton's interpreter at the addresses that the executable passes; calls run on CPU
tensors. Streams, the CUDA graph and the driver are not tested. Launches that may begin early do so as early as
possible: a launch runs when the first program of a later one waits, or when something else needs its results.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from korch.cuda.kernel import Launch
from korch.cuda.module import load_call
from korch.cuda.runtime.executable import CudaExecutable, open_engines
from korch.cuda.runtime.record import CudaProgram, StepProgram
from korch.cuda.runtime.schedule import STREAMS, schedule
from korch.primitive.types import DType
from tests.support.interpret import Early, Memory, run_launches


@dataclass
class Pending:
    """Launches that have begun early or are begun before, in order, and have not run yet."""

    constants: tuple[int, int] = (0, 0)  # begin and end of the constant memory
    launches: list[Callable[[Early], None]] = field(default_factory=list)
    early: int = 0  # the launches that have begun before the one in front of them had ended

    def end(self) -> None:
        """Run the last launch, which lets the others run when it waits."""
        if self.launches:
            self.launches.pop()(Early(self.end, self.constants))

    def add(self, run: Callable[[Early], None], is_early: bool) -> None:
        """Add a launch."""
        if not is_early:
            self.end()
        self.early += is_early
        self.launches.append(run)


class _Torch:
    """PyTorch with a replacement for `torch.cuda` that ignores streams."""

    def __init__(self, torch: Any, name: str, pending: Pending) -> None:
        self._torch = torch
        self.pending = pending
        self.steps: Iterator[StepProgram] = iter(())  # the steps that have not been issued
        self.cuda = SimpleNamespace(
            stream=self._stream, get_device_name=lambda _: name, is_current_stream_capturing=lambda: False
        )

    @contextmanager
    def _stream(self, _: Any) -> Iterator[None]:
        """Begin the next step, or the copies after the last one; all but launches wait for pending launches."""
        step = next(self.steps, None)
        if step is None or step.call or step.engine:
            self.pending.end()
        yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class Stream:
    """A stream for synchronous execution: events do nothing."""

    cuda_stream = 0

    def record_event(self) -> None:
        return

    def wait_event(self, event: None) -> None:
        return


class Interpreted:
    """A kernel that runs in the interpreter on buffers at given addresses."""

    def __init__(self, launch: Launch, pending: Pending) -> None:
        self.interpreted, self.pending = launch, pending

    def launch(self, programs: int, pointers: Sequence[int], stream: int, is_early: bool = False) -> None:
        """Begin the kernel."""
        memory: Any = [
            Memory(SimpleNamespace(ctypes=SimpleNamespace(data=pointer)))  # type: ignore[arg-type]
            for pointer in pointers
        ]
        self.pending.add(lambda early: run_launches([self.interpreted], [memory], early), is_early)


def issuer_on_cpu(program: Any, torch: Any, arena_bytes: int, device: str = "") -> Any:
    """Return an executable with arena and weights as CPU tensors; the caller sets functions, calls and tables."""
    owner: Any = object.__new__(CudaExecutable)
    owner._torch, owner._program, owner._is_early = _Torch(torch, device, Pending()), program, False
    owner._arena = torch.full((max(1, arena_bytes),), 255, dtype=torch.uint8)
    owner._weights, owner._tables = torch.from_numpy(program.weights.block), []
    return owner


def issue_on_cpu(
    program: CudaProgram, inputs: Sequence[Any], runs: int = 1, pending: Pending | None = None
) -> list[Any]:
    """Run a program `runs` times on CPU tensors, in the order of the executable; return its outputs.

    `pending`: counts the launches that begin early.

    Raises:
        ValueError: a buffer ends beyond the arena.
    """
    import torch

    for place in (place for step in program.steps for place in step.buffers if place.memory == "arena"):
        if place.at + place.size_bytes > max(1, program.plan.arena_bytes):
            raise ValueError(f"a buffer ends beyond the arena: {place}")
    owner = issuer_on_cpu(program, torch, program.plan.arena_bytes, program.plan.target["name"])
    owner._engines = open_engines(program, program.arch, owner._torch)
    owner._tables = [torch.tensor(table, dtype=torch.int32) for table in program.tables]
    owner._turns = schedule(program.steps)
    owner._is_early = program.is_early
    pending = owner._torch.pending = pending or Pending()
    begin = owner._weights.data_ptr()
    pending.constants = begin, begin + owner._weights.nbytes

    owner._calls = {s.call: load_call(s.call, program.sources[s.call]) for s in program.steps if s.call}
    owner._functions = {
        symbol: Interpreted(la.launch(program.sources), pending) for symbol, la in program.launches.items()
    }
    outputs = [torch.zeros(t.shape, dtype=getattr(torch, DType(t.dtype).numpy.name)) for t in program.plan.outputs]
    for _ in range(runs):
        owner._torch.steps = iter(program.steps)
        owner._issue([Stream() for _ in range(STREAMS)], inputs, outputs)
    return outputs
