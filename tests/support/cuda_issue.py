"""Runs a CUDA executable's program on the CPU, to test its memory, its calls of PyTorch and its copies.

Launches run in Triton's interpreter at the addresses that the executable passes; calls run on CPU
tensors. Streams, the CUDA graph and the driver are not tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from korch.cuda.kernel import Launch
from korch.cuda.module import load_call
from korch.cuda.runtime.executable import CudaExecutable, open_engines
from korch.cuda.runtime.record import CudaProgram
from korch.cuda.runtime.schedule import STREAMS, schedule
from korch.primitive.types import DType
from tests.support.interpret import Memory, run_launches


class _Torch:
    """PyTorch with a replacement for `torch.cuda` that ignores streams."""

    def __init__(self, torch: Any, name: str) -> None:
        self._torch = torch
        self.cuda = SimpleNamespace(
            stream=lambda _: nullcontext(), get_device_name=lambda _: name, is_current_stream_capturing=lambda: False
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class Stream:
    """A stream for synchronous execution: events do nothing."""

    cuda_stream = 0

    def record_event(self) -> None:
        return

    def wait_event(self, event: None) -> None:
        return


class _Function:
    """A kernel that runs in the interpreter on buffers at given addresses."""

    def __init__(self, launch: Launch) -> None:
        self.interpreted = launch

    def launch(self, programs: int, pointers: Sequence[int], stream: int) -> None:
        """Run the kernel."""
        memory: Any = [
            Memory(SimpleNamespace(ctypes=SimpleNamespace(data=pointer)))  # type: ignore[arg-type]
            for pointer in pointers
        ]
        run_launches([self.interpreted], [memory])


def issuer_on_cpu(program: Any, torch: Any, arena_bytes: int, device: str = "") -> Any:
    """Return an executable with arena and weights as CPU tensors; the caller sets functions, calls and tables."""
    owner: Any = object.__new__(CudaExecutable)
    owner._torch, owner._program = _Torch(torch, device), program
    owner._arena = torch.full((max(1, arena_bytes),), 255, dtype=torch.uint8)
    owner._weights, owner._tables = torch.from_numpy(program.weights.block), []
    return owner


def issue_on_cpu(program: CudaProgram, inputs: Sequence[Any], runs: int = 1) -> list[Any]:
    """Run a program `runs` times on CPU tensors, in the order of the executable; return its outputs.

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
    owner._calls = {s.call: load_call(s.call, program.sources[s.call]) for s in program.steps if s.call}
    owner._functions = {symbol: _Function(la.launch(program.sources)) for symbol, la in program.launches.items()}
    outputs = [torch.zeros(t.shape, dtype=getattr(torch, DType(t.dtype).numpy.name)) for t in program.plan.outputs]
    for _ in range(runs):
        owner._issue([Stream() for _ in range(STREAMS)], inputs, outputs)
    return outputs
