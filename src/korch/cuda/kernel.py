"""The kernel of a candidate on a CUDA device: launches of Triton kernels, a PyTorch call, or a TensorRT network."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.primitive.types import DType
from korch.system.alignment import round_up
from korch.system.content_name import content_name
from korch.tile.triton.launch import PrintedLaunches, PrintedProgram

logger = logging.getLogger("korch.cuda")

IMPORTS = """import triton
import triton.language as tl

import korch.cuda.functions as f
"""
"""The text at the head of a module of kernels."""

ALIGNMENT = 256
"""The alignment of all memory on a device that Korch allocates, in bytes."""

POINTER_ALIGNMENT = 16
"""The alignment in bytes that kernels rely on: that of the widest load of a thread."""

SIGNATURE = {
    DType.F64: "*fp64",
    DType.F32: "*fp32",
    DType.F16: "*fp16",
    DType.BF16: "*bf16",
    DType.I64: "*i64",
    DType.I32: "*i32",
    DType.I16: "*i16",
    DType.I8: "*i8",
    DType.U64: "*u64",
    DType.U32: "*u32",
    DType.U16: "*u16",
    DType.U8: "*u8",
    DType.BOOL: "*i8",
}
"""The names of pointer types for Triton's compiler."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton function whose parameters are pointers.

    Attributes:
        symbol: the function's name, made from its source.
        source: its source, without imports.
        signature: the element type of each parameter.
        arguments: the number of the buffer for each parameter, counting inputs, outputs, scratch and tables in order.
        grid: the number of programs.
        warps: the warps of a program.
    """

    symbol: str
    source: str
    signature: tuple[DType, ...]
    arguments: tuple[int, ...]
    grid: int
    warps: int


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of PyTorch's operators.

    Attributes:
        symbol: the function's name.
        source: the text of a Python function that takes the inputs as tensors in their layouts and
            returns the outputs.
    """

    symbol: str
    source: str


@dataclass(frozen=True, slots=True)
class Network:
    """A network for which TensorRT builds an engine when its weights are known.

    Attributes:
        symbol: a name made from the network and its constants.
        source: the network in ONNX's text form.
        model: the network as an ONNX model, with inputs i0, i1, ... and outputs o0, o1, ....
        constants: the positions of inputs that are constants of the engine.
    """

    symbol: str
    source: str
    model: bytes
    constants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """The kernel of a candidate.

    Attributes:
        steps: launches in order, one call, or one network.
        scratch: the element types and sizes of scratch buffers.
        tables: tables of 32-bit integers: constants, or zeros that a kernel counts in and sets back to 0.
    """

    steps: tuple[Launch, ...] | tuple[TorchCall] | tuple[Network]
    scratch: tuple[tuple[DType, int], ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches; empty for a call or a network."""
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def network(self) -> Network | None:
        """The network, or None if the kernel is not one."""
        return next((step for step in self.steps if isinstance(step, Network)), None)

    @property
    def size_input(self) -> str:
        """Always "": kernels for CUDA devices run for one size only."""
        return ""

    @property
    def workspace_bytes(self) -> int:
        """The size of the scratch memory."""
        return sum(aligned(size * dtype.size_bytes) for dtype, size in self.scratch)

    @property
    def thread_bytes(self) -> int:
        """Always 0: no thread has a private part of the scratch memory."""
        return 0

    @property
    def symbol(self) -> str:
        """A name made from the symbols of all steps."""
        text = " ".join(step.symbol for step in self.steps)
        return text if len(self.steps) == 1 else content_name("all", text)


def aligned(size_bytes: int) -> int:
    """Return a size rounded up to a multiple of `ALIGNMENT`, so that memory after it is aligned."""
    return round_up(size_bytes, ALIGNMENT)


def make_launch(printed: PrintedLaunches, number: Mapping[str, int], types: Mapping[str, DType]) -> Launch:
    """Return the launch of a printed function.

    `number`: the number of each buffer, by name. `types`: the element type of each buffer, by name.
    """
    symbol = content_name("k", f"{printed.source} {printed.warps}")
    return Launch(
        symbol,
        printed.source.replace("NAME", symbol),
        tuple(types[name] for name in printed.buffers),
        tuple(number[name] for name in printed.buffers),
        printed.grid,
        printed.warps,
    )


def kernel_of(
    printed: PrintedProgram, inputs: Sequence[tuple[str, DType]], outputs: Sequence[tuple[str, DType]]
) -> CudaKernel:
    """Check a printed tile program, and return its kernel.

    `inputs`: the names and element types of the buffers that it reads. `outputs`: the names and element types of the
    buffers that it writes.

    Raises:
        InvalidGraphError: a check fails.
    """
    from korch.tile.check.check import check_program  # not needed to compile: compiler processes start faster

    for line in check_program(printed.program):
        logger.info("a tile program is not fully checked: %s", line)
    types = dict((*inputs, *outputs))
    types |= {name: dtype for name, (dtype, _) in printed.scratch.items()}
    types |= dict.fromkeys(printed.tables, DType.I32)
    number = {name: i for i, name in enumerate(types)}
    launches = tuple(make_launch(p, number, types) for p in printed.launches)
    return CudaKernel(launches, tuple(printed.scratch.values()), tuple(printed.tables.values()))
