"""Kernels in Triton's interpreter: their meaning, without a device. For tests.

The process must have TRITON_INTERPRET=1 in its environment before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from korch.cuda.kernel import CudaKernel, Launch
from korch.cuda.module import load_functions
from korch.primitive.op import Array
from korch.primitive.types import DType

_NAMES = {DType.BOOL: "int8", DType.BF16: "bfloat16"}


@dataclass(frozen=True)
class Memory:
    """Where a buffer of a launch is: an array, and the byte at which the buffer begins."""

    array: Array
    offset: int = 0


@dataclass(frozen=True)
class _Pointer:
    """What the interpreter takes for a tensor: an address and an element type."""

    memory: Memory
    dtype: str

    def data_ptr(self) -> int:
        """Return the address."""
        return int(self.memory.array.ctypes.data) + self.memory.offset


def run_launches(launches: Sequence[Launch], memory: Sequence[Sequence[Memory]]) -> None:
    """Run launches in order.

    Args:
        launches: what to run.
        memory: per launch, its buffers in the order of its arguments.

    Raises:
        ValueError: the process does not interpret.
    """
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    module = load_functions(launches)

    class Executor(GridExecutor):  # type: ignore[misc]
        """Takes arrays where they are: nothing is copied there or back."""

        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
            return args_dev, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            return

    for launch, buffers in zip(launches, memory, strict=True):
        function = getattr(module, launch.symbol)
        if not isinstance(function, InterpretedFunction):
            raise ValueError("set TRITON_INTERPRET=1 before Triton is imported")
        arguments = [
            _Pointer(buffer, _NAMES.get(dtype, dtype.numpy.name))
            for buffer, dtype in zip(buffers, launch.signature, strict=True)
        ]
        with np.errstate(all="ignore"):
            Executor(function.rewrite(), function.arg_names, (launch.grid,))(*arguments)


def run_interpreted(
    kernel: CudaKernel, inputs: Sequence[Array], outputs: Sequence[tuple[DType, int]]
) -> list[Array]:
    """Run a kernel's launches; return the flat outputs.

    Args:
        kernel: launches only.
        inputs: flat arrays in the offered layouts.
        outputs: element type and number of elements of each output.

    Raises:
        ValueError: the process does not interpret.
    """
    memory = [np.ascontiguousarray(a).reshape(-1) for a in inputs]
    for dtype, size in (*outputs, *kernel.scratch):
        # Not a number: what a kernel forgets to write is seen.
        memory.append(np.full(size * dtype.size_bytes, 0xFF, np.uint8).view(dtype.numpy))
    memory += [np.array(table, np.int32) for table in kernel.tables]
    run_launches(
        kernel.launches, [[Memory(memory[i]) for i in la.arguments] for la in kernel.launches]
    )
    return memory[len(inputs) : len(inputs) + len(outputs)]
