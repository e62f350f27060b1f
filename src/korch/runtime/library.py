"""An archive of objects -> its plans, which the runtime runs through the C interface of `korch.h`."""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from korch.errors import ArtifactError, ProviderError
from korch.primitive.types import DType, ValueType
from korch.runtime.machine import best_isa
from korch.runtime.weights import Weights
from korch.system.native import ERROR_BYTES, Code, runtime

LIST = "korch_listed"
"""The symbol of the list of plans."""

INTERRUPTED = -1
REBUILD = "Build the artifact again"
FAILED = "An index that the model computes may be out of range; `korch doctor` checks libraries"

Tensors = tuple[tuple[str, ValueType], ...]
"""The name and type of each tensor."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("size_bytes", ctypes.c_int64),
    )


def _table(row: type) -> type[ctypes.Structure]:
    fields: Any = (("count", ctypes.c_int64), ("rows", ctypes.POINTER(row)))
    return type("_Table", (ctypes.Structure,), {"_fields_": fields})


class _Plan(ctypes.Structure):
    """The first tables of a plan (`korch_plan.c`)."""

    _fields_ = (
        *((name, _table(_Tensor)) for name in ("inputs", "outputs", "constants")),
        ("steps", _table(ctypes.c_byte)),
        ("symbols", _table(ctypes.c_char_p)),
    )


class Library:
    """One plan of loaded objects.

    Attributes:
        inputs: the model inputs that the plan declares.
        outputs: the model outputs that the plan declares.
        constants: the packed constants that the plan declares.
        kernels: the kernels' symbols in the order in which they run.
    """

    def __init__(self, plan: int, code: Code) -> None:
        """Read the tensors and kernels of a plan; `load_plans` makes the plans."""
        self.plan = ctypes.c_void_p(plan)
        self._code = code
        tables = _Plan.from_address(plan)
        self.inputs, self.outputs, self.constants = map(_tensors, (tables.inputs, tables.outputs, tables.constants))
        self.kernels = tuple(name.decode() for name in tables.symbols.rows[: tables.symbols.count])

    def function(self, name: str, result: Any = ctypes.c_int) -> Callable[..., Any]:
        """Return a function of the C interface; its arguments are not checked."""
        return ctypes.CFUNCTYPE(result)((f"korch_{name}", runtime()))


def _tensors(table: Any) -> Tensors:
    return tuple(
        (t.name.decode(), ValueType(tuple(t.shape[: t.rank]), DType(t.dtype.decode())))
        for t in table.rows[: table.count]
    )


class Handle:
    """A plan that is ready to run: its arena, its kernels' states, its weights.

    Calls from several threads wait for each other in native code, where they do not hold Python's global lock.
    """

    def __init__(self, library: Library, weights: Weights, threads: int) -> None:
        """Create the native plan.

        Raises:
            ProviderError: a kernel's create function failed; the message has its symbol.
        """
        self.library = library
        create = library.function("create", ctypes.c_void_p)
        error = ctypes.create_string_buffer(ERROR_BYTES)
        pointers = pointers_of(weights.pointers)
        handle = create(library.plan, pointers, ctypes.c_int(threads), error, ctypes.c_size_t(ERROR_BYTES))
        if not handle:
            raise ProviderError(
                f"it can't be set up: {error.value.decode(errors='replace')}", "executable", hint="Build it again"
            )
        self._handle = ctypes.c_void_p(handle)
        self._run = library.function("run")
        self._run_timed = library.function("run_timed")
        destroy = library.function("destroy", None)
        # The rest are arguments so that they outlive the handle.
        owned = weakref.finalize(self, _destroy, destroy, self._handle, pointers, weights, library)
        owned.atexit = False  # a daemon thread may still run it

    @property
    def pointer(self) -> ctypes.c_void_p:
        """The pointer that the functions of the plan take as their first argument."""
        return self._handle

    def run(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run once.

        Raises:
            ProviderError: a kernel failed.
            KeyboardInterrupt: the main thread was interrupted.
        """
        self._call(self._run, pointers_of(inputs), pointers_of(outputs))

    def bound(self, inputs: Sequence[int], outputs: Sequence[int]) -> Callable[[], None]:
        """Return a function that runs the plan with these addresses; it raises the same errors as `run`."""
        return partial(self._call, self._run, pointers_of(inputs), pointers_of(outputs))

    def run_timed(self, inputs: Sequence[int], outputs: Sequence[int]) -> list[int]:
        """Run once; return the nanoseconds of each kernel.

        Raises:
            ProviderError: a kernel failed.
        """
        times_ns = (ctypes.c_int64 * len(self.library.kernels))()
        self._call(self._run_timed, pointers_of(inputs), pointers_of(outputs), times_ns)
        return list(times_ns)

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        """Call a function that runs the plan; call it again after an interrupt whose Python handler raises nothing."""
        while (code := function(self._handle, *arguments)) == INTERRUPTED:
            pass  # Python calls the handler before the next iteration
        if code:
            where = f"kernel {self.library.kernels[code - 1]}"
            raise ProviderError("it failed while it ran", where, hint=FAILED)


def _destroy(destroy: Callable[[Any], None], handle: ctypes.c_void_p, *_: object) -> None:
    destroy(handle)


def pointers_of(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Return addresses as an array for a call into C."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def load_plans(objects: Mapping[str, bytes]) -> list[Library]:
    """Load the objects for the best instruction set of this CPU; return their plans.

    Raises:
        ArtifactError: they can't be loaded, or are for other CPUs.
    """
    try:
        code = Code(objects[best_isa(objects)])
    except ValueError as error:
        raise ArtifactError(f"its kernels can't be loaded: {error}", hint=REBUILD) from error
    at = code.address(LIST)
    if at is None:
        raise ArtifactError("its kernels have no plans", hint=REBUILD)
    found = _table(ctypes.c_void_p).from_address(at)
    ctypes.c_int.in_dll(runtime(), "korch_catches_interrupts").value = 1
    return [Library(plan, code) for plan in found.rows[: found.count]]
