"""The runtime: a shared library in C (`korch/native`) that runs plans, loads kernels and times them."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

from korch.errors import CompileError
from korch.system.cores import usable_cores
from korch.system.libraries import find_onnxruntime
from korch.system.native_build import FOLDER, build_library, find_compiler, library_path

logger = logging.getLogger("korch.system")

ERROR_BYTES = 1024
"""The room for an error message of the runtime."""


@cache
def runtime_path() -> Path:
    """Return the runtime's shared library. Wheels have it; in a checkout, it is compiled again after a change.

    Raises:
        CompileError: it is not there, and can't be compiled.
    """
    path = library_path()
    if path.exists():
        return path
    if not find_compiler():
        raise CompileError(
            "the runtime is not compiled for these sources",
            where=str(FOLDER),
            hint="Run: pip install ziglang, which compiles it when it is next used",
        )
    logger.info("compiling the runtime")
    try:
        return build_library()
    except OSError as error:
        raise CompileError(f"the runtime can't be compiled: {error}", where=str(FOLDER)) from error


@cache
def runtime() -> ctypes.CDLL:
    """Return the loaded runtime, which knows where ONNX Runtime's library is.

    Raises:
        CompileError: it can't be compiled.
    """
    native = ctypes.CDLL(str(runtime_path()))
    native.korch_use_cores(usable_cores())
    if path := find_onnxruntime():
        native.korch_use_onnxruntime(str(path).encode())
    native.korch_rate.restype = ctypes.c_double
    for name in ("least_time", "time_fresh"):
        getattr(native, f"korch_{name}").restype = ctypes.c_int64
    for name in ("load", "symbol", "create"):
        getattr(native, f"korch_{name}").restype = ctypes.c_void_p
    return native


class Code:
    """Kernels and tables that were loaded from an archive of objects; freed with this object."""

    def __init__(self, archive: bytes) -> None:
        """Load an archive.

        Raises:
            ValueError: it is damaged, or is not for this machine.
        """
        self._native, error = runtime(), ctypes.create_string_buffer(ERROR_BYTES)
        self._code = ctypes.c_void_p(
            self._native.korch_load(0, archive, ctypes.c_int64(len(archive)), error, ctypes.c_size_t(ERROR_BYTES))
        )
        if not self._code:
            raise ValueError(error.value.decode(errors="replace"))

    def __del__(self) -> None:
        if getattr(self, "_code", None):
            self._native.korch_unload(self._code)

    def address(self, symbol: str) -> int | None:
        """Return the address of a symbol; None if there is none."""
        found = self._native.korch_symbol(self._code, symbol.encode())
        return None if found is None else int(found)

    def function(self, symbol: str, result: type | None = ctypes.c_int) -> ctypes._FuncPointer:
        """Return a function; its arguments are not checked.

        Raises:
            KeyError: there is none.
        """
        address = self.address(symbol)
        if address is None:
            raise KeyError(symbol)
        found = ctypes.CFUNCTYPE(result)(address)
        found.__dict__["code"] = self  # outlives the function
        return found
