"""A folder of `korch unpack`, run by the functions that C programs call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.runtime.library import _Tensor, pointers_of
from korch.system.native import ERROR_BYTES, runtime


class Session:
    """A session of a model (`korch.h`)."""

    def __init__(self, folder: Path, outputs: int, threads: int = 1) -> None:
        self._native, self._outputs = runtime(), outputs
        self._error = ctypes.create_string_buffer(ERROR_BYTES)
        self._model = ctypes.c_void_p(self._function("open")(str(folder).encode(), *self._rest))
        self._session = ctypes.c_void_p(
            self._function("start")(self._model, ctypes.c_int(threads), *self._rest) if self._model else None
        )
        if not self._session:
            raise ValueError(self._error.value.decode())

    @property
    def _rest(self) -> tuple[object, ctypes.c_size_t]:
        return self._error, ctypes.c_size_t(ERROR_BYTES)

    def _function(self, name: str, result: type | None = ctypes.c_void_p) -> ctypes._FuncPointer:
        return ctypes.CFUNCTYPE(result)((f"korch_{name}", self._native))

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the outputs for some inputs.

        Raises:
            ValueError: no plan takes them.
        """
        shapes = [(ctypes.c_int64 * max(1, a.ndim))(*a.shape) for a in arrays]
        given = pointers_of([ctypes.addressof(shape) for shape in shapes])
        found = self._function("fit", ctypes.POINTER(_Tensor))(self._session, given, *self._rest)
        if not found:
            raise ValueError(self._error.value.decode())
        assert not self._error.value
        tensors = found[: self._outputs]
        outputs = [np.empty(t.shape[: t.rank], DType(t.dtype.decode()).numpy) for t in tensors]
        assert [t.size_bytes for t in tensors] == [a.nbytes for a in outputs]
        self.serve(arrays, outputs)
        return outputs

    def serve(self, arrays: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Run as `run` has fitted."""
        dense = [np.ascontiguousarray(a) for a in arrays]
        own, results = (pointers_of([a.ctypes.data for a in some]) for some in (dense, outputs))
        assert self._function("serve", ctypes.c_int)(self._session, own, results) == 0

    @property
    def length(self) -> int:
        """The rows so far."""
        return int(self._function("length", ctypes.c_int64)(self._session))

    def truncate(self, length: int) -> bool:
        """Forget all rows but the first ones; return whether there were as many."""
        return not self._function("truncate", ctypes.c_int)(self._session, ctypes.c_int64(length))

    def memory(self, number: int, size: int) -> bytes:
        """Return the first bytes of a state, as `struct korch_session` has them."""
        states = ctypes.c_void_p.from_address((self._session.value or 0) + 7 * 8).value or 0
        return ctypes.string_at(ctypes.c_void_p.from_address(states + 8 * number).value or 0, size)

    def fork(self) -> Session:
        """Return a session with the same rows."""
        found = Session.__new__(Session)
        found.__dict__.update(self.__dict__)
        found._session = ctypes.c_void_p(self._function("fork")(self._session, *self._rest))
        return found

    def stop(self) -> None:
        """Free the session."""
        self._function("stop", None)(self._session)

    def close(self) -> None:
        """Free the session and the model."""
        self.stop()
        self._function("close", None)(self._model)
