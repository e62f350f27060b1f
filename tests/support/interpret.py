"""Runs kernels for CUDA devices in Triton's interpreter, without a device.

The process must have TRITON_INTERPRET=1 in its environment before Triton is imported.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from korch.cuda.kernel import CudaKernel, Launch
from korch.cuda.module import load_functions
from korch.primitive.op import Array
from korch.primitive.types import DType


@dataclass(frozen=True)
class Memory:
    """The place of a launch's buffer: an array, and the byte offset at which the buffer begins."""

    array: Array
    offset: int = 0


@dataclass(frozen=True)
class _Pointer:
    """An argument that the interpreter treats as a tensor: an address and an element type."""

    memory: Memory
    dtype: Any

    def data_ptr(self) -> int:
        """Return the address."""
        return int(self.memory.array.ctypes.data) + self.memory.offset


@dataclass(frozen=True)
class Early:
    """What a launch meets that begins before earlier work has ended."""

    end: Callable[[], None]  # ends the earlier work; called when the first program waits, or when all have run
    constants: tuple[int, int] = (0, 0)  # begin and end of the memory that may be prefetched before


def run_launches(launches: Sequence[Launch], memory: Sequence[Sequence[Memory]], early: Early | None = None) -> None:
    """Run launches in order.

    Args:
        launches: the launches to run.
        memory: for each launch, its buffers in the order of its arguments.
        early: the earlier work that the first launch has to wait for; none if not given.

    Raises:
        ValueError: the process does not interpret.
        AssertionError: a program of a launch that waits accesses memory before.
    """
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    module = load_functions(launches)

    class Executor(GridExecutor):  # type: ignore[misc]
        """Uses arrays in place: nothing is copied to or from a device."""

        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
            return args_dev, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            return

    functions = [getattr(module, launch.symbol) for launch in launches]
    if not all(isinstance(function, InterpretedFunction) for function in functions):
        raise ValueError("set TRITON_INTERPRET=1 before Triton is imported")
    _quicken()
    with np.errstate(all="ignore"):
        for launch, function, buffers in zip(launches, functions, memory, strict=True):
            with _checked_waits(launch, early or Early(lambda: None)), _checked_addresses(buffers):
                Executor(function.rewrite(), function.arg_names, (launch.grid,))(*_pointers(launch, buffers))


@contextmanager
def _checked_addresses(buffers: Sequence[Memory]) -> Iterator[None]:
    """Raise IndexError if a launch accesses memory outside of its buffers, which may end the process on a device."""
    from triton.runtime import interpreter

    if not all(hasattr(memory.array, "nbytes") for memory in buffers):  # an address without a size
        yield
        return
    arrays = [(int(memory.array.ctypes.data), memory.array.nbytes) for memory in buffers]
    builder = interpreter.InterpreterBuilder

    def check(pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        found = np.broadcast_to(pointers.data, np.shape(mask.data))[np.asarray(mask.data, bool)].astype(np.int64)
        inside = np.zeros(found.shape, bool)
        for begin, length in arrays:
            inside |= (found >= begin) & (found + size <= begin + length)
        if not inside.all():
            raise IndexError(f"{int((~inside).sum())} of {inside.size} accesses are outside of all buffers")

    def load(self: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        check(pointers, mask)
        return masked_load(self, pointers, mask, *others, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any, **named: Any) -> Any:
        check(pointers, mask)
        return masked_store(self, pointers, value, mask, *others, **named)

    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store
    with patch.object(builder, "create_masked_load", load), patch.object(builder, "create_masked_store", store):
        yield


ACCESSES = "create_masked_load", "create_masked_store", "create_atomic_rmw"


@cache
def _unchecked() -> tuple[Callable[..., Any], ...]:
    """Return the interpreter's own functions: launches that run within another one are checked by themselves."""
    from triton.runtime.interpreter import InterpreterBuilder as Kind

    return Kind.set_grid_idx, *(getattr(Kind, name) for name in ACCESSES)


@contextmanager
def _checked_waits(launch: Launch, early: Early) -> Iterator[None]:
    """Let each program of a launch wait by itself, and check what it does before."""
    from triton.runtime import interpreter

    from korch.cuda import functions

    builder, kind = interpreter.interpreter_builder, interpreter.InterpreterBuilder
    waits, ended = "f.wait_for_earlier()" in launch.source, False
    has_waited = not waits
    set_index, *accesses = _unchecked()

    def end() -> None:
        nonlocal ended
        if not ended:
            ended = True
            grid = builder.grid_idx, builder.grid_dim
            early.end()  # may interpret other launches
            builder.grid_idx, builder.grid_dim = grid

    def begin(self: Any, *index: int) -> None:
        nonlocal has_waited
        has_waited = not waits
        set_index(self, *index)

    def wait() -> None:
        nonlocal has_waited
        end()
        has_waited = True

    def after_wait(function: Callable[..., Any]) -> Callable[..., Any]:
        def access(*args: Any, **named: Any) -> Any:
            assert has_waited, "memory is accessed before the wait"
            return function(*args, **named)

        return access

    def prefetch(pointer: Any, first: Any, lines: int, each: int) -> None:
        begin = int(pointer.handle.data.item())
        assert not has_waited and each > 0
        assert early.constants[0] <= begin and begin + 128 * lines <= early.constants[1], "not constant"

    checked: dict[str, Any] = dict(zip(ACCESSES, map(after_wait, accesses), strict=True))
    with (
        patch.object(kind, "set_grid_idx", begin),
        patch.multiple(kind, **checked),
        patch.object(functions, "begin_next", lambda: None),
        patch.object(functions, "wait_for_earlier", wait),
        patch.object(functions, "prefetch", prefetch),
    ):
        yield
    end()


def _pointers(launch: Launch, buffers: Sequence[Memory]) -> list[Any]:
    """Return the arguments of a launch."""
    return [
        _Pointer(buffer, np.dtype(np.int8) if dtype is DType.BOOL else np.dtype(dtype.numpy))
        for buffer, dtype in zip(buffers, launch.signature, strict=True)
    ]


@cache
def _quicken() -> None:
    """Make the interpreter faster, for as long as the process runs, and let it accept all precisions of products.

    The interpreter replaces the language's functions in every call of one of our functions; here this is
    done once. It checks for integer overflows, which it reports in debug mode only; here
    it checks in debug mode only. It multiplies float32 in the same way for every precision, but rejects
    some precisions. It makes the types of shapes and numbers anew for each operation; here they are remembered.
    """
    from triton import language
    from triton.runtime import interpreter

    core, builder = language.core, interpreter.interpreter_builder
    interpreter._patch_lang(SimpleNamespace(__globals__={"language": language, "core": core}))
    setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())  # noqa: B010 - mypy knows no types
    # Since NumPy 2.4 the interpreter's own conversion to an integer fails with arrays of one element.
    core.tensor.__index__ = lambda tensor: tensor.handle.data.item()
    precisions = (*builder.options.allowed_dot_input_precisions, "bf16x6")
    builder.options = replace(
        builder.options, sanitize_overflow=builder.options.debug, allowed_dot_input_precisions=precisions
    )
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype, lambda dtype: dtype.name)
    _remember_blocks(core)


def _remembered(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that remembers its results by a key of its arguments."""
    known: dict[Any, Any] = {}

    def found(*args: Any) -> Any:
        name = key(*args)
        if name not in known:
            known[name] = function(*args)
        return known[name]

    return found


def _remember_blocks(core: Any) -> None:
    """Let types of blocks and their tensors share what follows from the same sizes and type of elements."""
    make_block, known = core.block_type.__init__, {}
    none = core.tuple([]), core.constexpr(1)

    def block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            make_block(self, element, shape)
            self.of_tensor = core.tuple([core.constexpr(size) for size in self.shape]), core.constexpr(self.numel)
            known[key] = {**vars(self)}
        vars(self).update(known[key])
        self.element_ty = element

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else none

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _reduce(self: Any, tensors: Sequence[Any]) -> list[Any]:
    """Combine the halves of a tile along an axis until one slice is left, as a device does.

    The interpreter's own function combines one number at a time.
    """
    ((tensor,), axis) = self.unravel(tensors, self.axis)
    data = np.moveaxis(tensor.handle.data, axis, 0)
    while len(data) > 1:
        halves = (self.to_tensor(half, tensor.dtype) for half in np.split(data, 2))
        data = self.combine_fn.fn(*halves).handle.data
    found = np.expand_dims(data[0], axis) if self.keep_dims else data[0]
    return [self.to_tensor(found, tensor.dtype)]


def run_interpreted(kernel: CudaKernel, inputs: Sequence[Array], outputs: Sequence[tuple[DType, int]]) -> list[Array]:
    """Run a kernel's launches; return the flat outputs.

    Args:
        kernel: a kernel that consists of launches only.
        inputs: flat arrays in the layouts of the offer.
        outputs: element type and number of elements of each output.

    Raises:
        ValueError: the process does not interpret.
    """
    memory = [np.ascontiguousarray(a).reshape(-1) for a in inputs]
    for dtype, size in (*outputs, *kernel.scratch):
        # Floats are NaN, which shows elements that a kernel does not write.
        memory.append(np.full(size * dtype.size_bytes, 0xFF, np.uint8).view(dtype.numpy))
    memory += [np.array(table, np.int32) for table in kernel.tables]
    run_launches(kernel.launches, [[Memory(memory[i]) for i in la.arguments] for la in kernel.launches])
    return memory[len(inputs) : len(inputs) + len(outputs)]
