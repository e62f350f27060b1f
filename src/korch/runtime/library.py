"""The bytes of a shared library -> its plans, which can be called through the C interface of `korch.h`."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from korch.errors import ArtifactError, ProviderError
from korch.primitive.types import DType, ValueType
from korch.runtime.weights import Weights
from korch.system.libraries import announce_onnxruntime, load_globally
from korch.system.scratch import scratch_folder

ABI_VERSION = 4
ERROR_BYTES = 1024
INTERRUPTED = -1
REBUILD = "Build the artifact again"

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


class _SymbolPlace(ctypes.Structure):
    _fields_ = (
        ("library", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class Library:
    """One plan of a loaded library.

    Attributes:
        inputs: the model inputs that the library declares.
        outputs: the model outputs that the library declares.
        constants: the packed constants that the library declares.
        kernels: the kernels' symbols in the order in which they run.
    """

    def __init__(self, plan: int, native: ctypes.CDLL) -> None:
        """Read the tensors and kernels of a plan; `load_plans` makes the plans.

        Args:
            plan: the plan's address.
            native: the library that has it; it is unloaded when nothing refers to it any more.
        """
        self.plan = ctypes.c_void_p(plan)
        self._native = native
        self.inputs = self._tensors("inputs")
        self.outputs = self._tensors("outputs")
        self.constants = self._tensors("constants")
        count = ctypes.c_int64()
        names = self.function("kernels", ctypes.POINTER(ctypes.c_char_p))(self.plan, ctypes.byref(count))
        self.kernels = tuple(names[i].decode() for i in range(count.value))

    def function(self, name: str, result: Any = ctypes.c_int) -> Callable[..., Any]:
        """Return a function of the C interface; its arguments are not checked."""
        return ctypes.CFUNCTYPE(result)(self.address(name))

    def address(self, name: str) -> int:
        """Return the address of a function of the C interface."""
        found = ctypes.cast(getattr(self._native, f"korch_{name}"), ctypes.c_void_p).value
        assert found is not None
        return found

    def _tensors(self, function: str) -> Tensors:
        count = ctypes.c_int64()
        found = self.function(function, ctypes.POINTER(_Tensor))(self.plan, ctypes.byref(count))
        return tuple(
            (t.name.decode(), ValueType(tuple(t.shape[: t.rank]), DType(t.dtype.decode())))
            for t in found[: count.value]
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
        self._weights = weights
        self._handle = ctypes.c_void_p(handle)
        self._run = library.function("run")
        self._run_timed = library.function("run_timed")
        destroy = library.function("destroy", None)
        # The weights and the library are arguments so that they outlive the handle.
        weakref.finalize(self, _destroy, destroy, self._handle, weights, library)

    @property
    def pointer(self) -> ctypes.c_void_p:
        """The pointer that the functions of the plan take as their first argument."""
        return self._handle

    @property
    def timed_address(self) -> int:
        """The address of `korch_run_timed`, for native code that calls it."""
        return self.library.address("run_timed")

    @property
    def run_address(self) -> int:
        """The address of `korch_run`, for native code that calls it."""
        return self.library.address("run")

    def run(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run once.

        Args:
            inputs: the address of each input.
            outputs: the address of each output.

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
            raise ProviderError("it failed while it ran", where, hint="Build it again; `korch doctor` checks libraries")


def _destroy(destroy: Callable[[Any], None], handle: ctypes.c_void_p, weights: Weights, library: Library) -> None:
    destroy(handle)


def pointers_of(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Return addresses as an array for a call into C."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def load_plans(content: bytes, libraries: Iterable[str] = ()) -> list[Library]:
    """Load a shared library; return its plans.

    Args:
        content: the shared library's bytes.
        libraries: shared libraries that it calls, with the names of the compiler's option -l.

    Raises:
        ArtifactError: it can't be loaded, or its interface has another version.
    """
    native = _load(content, libraries)
    version = native.korch_abi_version()
    if version != ABI_VERSION:
        raise ArtifactError(
            f"its C interface has version {version}",
            expected=f"version {ABI_VERSION}",
            hint="Build it again with this version of Korch",
        )
    count = ctypes.c_int64()
    native.korch_plans.restype = ctypes.POINTER(ctypes.c_void_p)
    plans = native.korch_plans(ctypes.byref(count))
    ctypes.c_int.in_dll(native, "korch_catches_interrupts").value = 1
    return [Library(plans[i], native) for i in range(count.value)]


def _load(content: bytes, libraries: Iterable[str]) -> ctypes.CDLL:
    _check_size(content)
    announce_onnxruntime()
    try:
        load_globally(libraries)
        # Each library has its own path: the loader takes files with the same path for the same library.
        with scratch_folder() as folder:
            path = folder / "library.so"
            path.write_bytes(content)
            native = ctypes.CDLL(str(path))
        _keep_openmp(native)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"its library can't be loaded: {error}", hint="`korch doctor` says what is missing"
        ) from error
    # At the end of the process, the system unloads all libraries in the right order.
    weakref.finalize(native, _ctypes.dlclose, native._handle).atexit = False
    return native


def _keep_openmp(native: ctypes.CDLL) -> None:
    """Keep the OpenMP library that a library calls loaded until the process ends.

    Its threads outlive the plans that they ran, and wait for the next region in its code.

    Raises:
        OSError: it can't be opened again.
    """
    place = _SymbolPlace()
    if hasattr(native, "omp_get_max_threads"):
        address = ctypes.cast(native.omp_get_max_threads, ctypes.c_void_p)
        if ctypes.CDLL(None).dladdr(address, ctypes.byref(place)):
            ctypes.CDLL(os.fsdecode(place.library))  # `ctypes` never closes what it opens


def _check_size(content: bytes) -> None:
    """Check that a library contains all bytes that its ELF header declares as mapped.

    If bytes are missing, the loader maps the range anyway, and the first access to it ends the process.

    Raises:
        ArtifactError: bytes are missing, or it is not a 64-bit shared library.
    """
    try:
        magic, at, sections, size, count, section, section_count = struct.unpack_from("<5s27xQQ6xHHHH", content)
        ends = [sections + section * section_count]
        for i in range(count):
            kind, offset, mapped = struct.unpack_from("<I4xQ16xQ", content, at + i * size)
            ends.append(offset + mapped if kind == _TO_BE_MAPPED else 0)
    except (struct.error, OverflowError) as error:
        raise ArtifactError("its library can't be loaded: it is truncated", hint=REBUILD) from error
    if magic != _ELF or max(ends) > len(content):
        raise ArtifactError("its library can't be loaded: it is truncated", hint=REBUILD)


_ELF = b"\x7fELF\x02"
_TO_BE_MAPPED = 1  # PT_LOAD
