"""The common base classes of all executables: calls by name, checks of inputs, descriptions, files.

`Runnable` implements everything that can be derived from a call, the descriptions of inputs and outputs, and
the content of an archive. `PlanExecutable` adds what can be derived from a single plan.
"""

from __future__ import annotations

import base64
import io
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from korch.errors import ArtifactError, InputError, quoted
from korch.inputs import random_arrays
from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.runtime.artifact import Archive
from korch.runtime.each_isa import archive_of_isas
from korch.runtime.record import ModelRecord, PlanRecord, TensorRecord
from korch.runtime.recurrent import RecurrentSession
from korch.runtime.text import executable_text, plan_facts

if TYPE_CHECKING:
    from korch.runtime.report import AnyReport, Report

_ONNX_TYPE = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U64: "uint64",
    DType.U32: "uint32",
    DType.U16: "uint16",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}


_NUMPY = np.ndarray, np.generic

FEW = 8
"""At most this many indices are compared one by one, which takes less time than a call of NumPy."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The description of a model input or output, like that of an ONNX Runtime session.

    Attributes:
        name: its name.
        shape: elements per axis.
        type: the type as ONNX Runtime writes it, such as "tensor(float)".
        dtype: the NumPy type.
    """

    name: str
    shape: list[Any]
    type: str
    dtype: np.dtype[Any]

    @staticmethod
    def of(tensor: TensorRecord) -> TensorInfo:
        """Return the description of a recorded tensor."""
        dtype = DType(tensor.dtype)
        text = f"tensor({_ONNX_TYPE[dtype]})"
        return TensorInfo(tensor.name, list(tensor.shape), text, dtype.numpy)


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of repeated runs.

    Attributes:
        run_ns: per run, the time from call to return.
        kernel_ns: per run, the time of each kernel.
    """

    run_ns: tuple[int, ...]
    kernel_ns: tuple[tuple[int, ...], ...]


def random_feeds(tensors: Sequence[TensorInfo], seed: int = 0) -> dict[str, Array]:
    """Return a random array for each input of an executable, by name.

    Raises:
        OptionError: the seed is negative.
    """
    return random_arrays({tensor.name: (tuple(tensor.shape), tensor.dtype) for tensor in tensors}, seed)


class Runnable(ABC):
    """A model that can run: call it with arrays, or use its `run` like that of an ONNX Runtime session.

    Attributes:
        others: the executables for other instruction sets, and this one, that `save` writes to the same file, by
            instruction set; empty if there is only this one.
        absent: the instruction sets whose executables were in the same file, and were not loaded.
    """

    others: Mapping[str, Runnable] = MappingProxyType({})
    absent: tuple[str, ...] = ()

    @property
    @abstractmethod
    def report(self) -> AnyReport:
        """How it was made; `save` stores it."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """The number of threads that a run uses."""

    @property
    @abstractmethod
    def model(self) -> ModelRecord:
        """The model file that it was built from."""

    @abstractmethod
    def get_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the model's inputs, in the order of a call's arguments."""

    def get_overridable_initializers(self) -> list[TensorInfo]:
        """Return descriptions of the inputs that have a default and need not be given, as ONNX Runtime does."""
        return [info for info in self.get_inputs() if info.name in self.defaults]

    @cached_property
    def defaults(self) -> Mapping[str, Array]:
        """The elements of the inputs that need not be given, by name.

        Raises:
            ArtifactError: they do not fit the inputs.
        """
        infos = {info.name: info for info in self.get_inputs()}
        try:
            return {
                name: np.frombuffer(base64.b64decode(text), infos[name].dtype).reshape(infos[name].shape)
                for name, text in self.model.defaults.items()
            }
        except (KeyError, ValueError) as error:
            raise ArtifactError(f"the default of an input is damaged ({error})", hint="Build it again") from error

    def example_inputs(self) -> list[TensorInfo]:
        """Return descriptions of valid inputs with fixed shapes; several shapes may be possible."""
        return self.get_inputs()

    @abstractmethod
    def get_outputs(self) -> list[TensorInfo]:
        """Return descriptions of the model's outputs, in the order in which a call returns them."""

    def __call__(self, *arrays: Any, **named: Any) -> tuple[Array, ...]:
        """Run the model.

        Args:
            arrays: one for each input, in the model's order; or one for each input without a default.
            named: instead of `arrays`, one for each input by its name.

        Returns:
            An array for each output, in the model's order.

        Raises:
            InputError: an array has another shape or type, there are too few or too many, or a name is unknown.
            ProviderError: a kernel or the host failed.
        """
        if not named:
            return self.compute(arrays)
        names, _ = self._names()
        if arrays:
            raise InputError(
                f"{len(arrays)} arrays are given by position and {quoted(list(named))} by name",
                expected="all by position or all by name",
            )
        return self.compute(self._fed(named, names))

    @abstractmethod
    def compute(self, arrays: Sequence[Any]) -> tuple[Array, ...]:
        """Return the model's outputs; `arrays` has one array for each input. It raises the errors of `__call__`."""

    @abstractmethod
    def archive(self) -> Archive:
        """Return the content of the file that `save` writes.

        Raises:
            ArtifactError: it can't be saved by itself.
        """

    @abstractmethod
    def facts(self) -> str:
        """Return a line about its plans."""

    @classmethod
    @abstractmethod
    def load(cls, path: str | os.PathLike[str] | IO[bytes]) -> Self:
        """Load a file that `save` wrote.

        Raises:
            ArtifactError: it can't be read, is damaged, or is for another machine.
            UnsupportedError: its device or its host is not available here.
            ProviderError: a kernel can't be set up.
        """

    def __repr__(self) -> str:
        return executable_text(self, self.facts())

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], run_options: None = None
    ) -> list[Array]:
        """Run the model like `onnxruntime.InferenceSession.run`.

        Args:
            output_names: the outputs to return, in this order; None for all.
            feeds: an array for each input, by name; those with a default may be missing.
            run_options: for ONNX Runtime only; must be None.

        Raises:
            InputError: a name is unknown or missing, or an array has another shape or type.
            ProviderError: a kernel or the host failed.
        """
        if run_options is not None:
            raise InputError("run_options is for ONNX Runtime only", expected="None")
        names, offered = self._names()
        arrays = self._fed(feeds, names)
        if output_names is None:
            return list(self.compute(arrays))
        wanted = list(output_names)
        if unknown := [name for name in wanted if name not in offered]:
            raise InputError(f"there is no output {unknown[0]!r}", expected=quoted(offered))
        found = dict(zip(offered, self.compute(arrays), strict=True))
        return [found[name] for name in wanted]

    def _names(self) -> tuple[Sequence[str], Sequence[str]]:
        return [info.name for info in self.get_inputs()], [info.name for info in self.get_outputs()]

    def _fed(self, feeds: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        _check_feeds(feeds, names, self.defaults)
        return [feeds[name] if name in feeds else self.defaults[name] for name in names]

    @property
    def in_place(self) -> Sequence[tuple[int, ...]]:
        """The outputs that may lie in the memory of an input, with this input."""
        return ()

    def run_into(self, feeds: Mapping[str, Any], into: Mapping[int, Array]) -> Sequence[Array]:
        """Return all outputs; `into` has the memory of some of `in_place`, that of their inputs."""
        return self.run(None, feeds)

    def complete(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Return an array for each input; if only the inputs without a default are given, with the defaults.

        Raises:
            InputError: there are too few or too many arrays.
        """
        names, _ = self._names()
        needed = [name for name in names if name not in self.defaults]
        if len(arrays) == len(names):
            return arrays
        if len(arrays) == len(needed):
            given = {**self.defaults, **dict(zip(needed, arrays, strict=True))}
            return [given[name] for name in names]
        least = f", or {len(needed)} without {quoted(self.defaults)}" if self.defaults else ""
        raise InputError(f"it was called with {len(arrays)} arrays", expected=f"{len(names)}: {quoted(names)}{least}")

    def session(self, states: Mapping[str, str] | None = None) -> RecurrentSession:
        """Return a session that keeps states of a fixed shape between runs, as those of a recurrent model.

        `states`: by the name of each input that is a state, the output that replaces it; by default those whose names
        differ only by words such as "past" and "present", or "in" and "out".

        Raises:
            InputError: there are no such tensors, they have different types, or the names leave it open.
        """
        return RecurrentSession(self, states)

    def stopwatch(self, arrays: Sequence[Any]) -> Callable[[], int]:
        """Return a function that runs the model once on these arrays and returns the nanoseconds."""

        def once() -> int:
            start = time.perf_counter_ns()
            self(*arrays)
            return time.perf_counter_ns() - start

        return once

    def time(self, arrays: Sequence[Any], repeat: int) -> Timing:
        """Run several times, and return the time of each run, and of each kernel where it is known.

        Args:
            arrays: one for each input, in the model's order.
            repeat: the number of runs.

        Raises:
            InputError: an array has another shape or type, or there are too few or too many.
            ProviderError: a kernel or the host failed.
        """
        once = self.stopwatch(arrays)
        return Timing(tuple(once() for _ in range(repeat)), ((),) * repeat)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the executable to one file, which `korch.load` reads.

        Raises:
            ArtifactError: the file can't be written (a previous file is then unchanged), or the
                executable can't be saved by itself.
        """
        self._whole().write(path)

    def to_bytes(self) -> bytes:
        """Return the content of the file that `save` would write; it raises the errors of `archive`."""
        return self._whole().to_bytes()

    def _whole(self) -> Archive:
        if self.absent:
            raise ArtifactError(
                f"the executable is for this CPU; its artifact is for {', '.join(self.absent)}, too",
                hint="Copy the artifact's file, or save what `korch.optimize` returned",
            )
        if not self.others:
            return self.archive()
        return archive_of_isas({isa: one.archive() for isa, one in self.others.items()})

    def __reduce__(self) -> tuple[Callable[[Any], Runnable], tuple[io.BytesIO], dict[str, Any]]:
        """Pickle and copy it as the bytes of its artifact; a copy has its own memory."""
        absent = self.absent or tuple(isa for isa, one in self.others.items() if one is not self)
        return type(self).load, (io.BytesIO(self.archive().to_bytes()),), {"absent": absent}


class PlanExecutable(Runnable):
    """A runnable with a single plan."""

    @property
    @abstractmethod
    def report(self) -> Report:
        """How the plan was found; `save` stores it."""

    @report.setter
    @abstractmethod
    def report(self, report: Report) -> None: ...

    @property
    @abstractmethod
    def plan(self) -> PlanRecord:
        """The plan: its kernels in order, and all other facts recorded about it."""

    @property
    @abstractmethod
    def sources(self) -> Mapping[str, str]:
        """The sources by name."""

    @property
    def threads(self) -> int:
        """The number of threads of its plan."""
        return self.plan.threads

    @property
    def model(self) -> ModelRecord:
        """The model file that its plan was built from."""
        return self.plan.model

    def facts(self) -> str:
        """Return a line about its plan."""
        return plan_facts(self.plan, self.report)

    def get_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the model's inputs, in the order of a call's arguments."""
        return [TensorInfo.of(tensor) for tensor in self.plan.inputs]

    def get_outputs(self) -> list[TensorInfo]:
        """Return descriptions of the model's outputs, in the order in which a call returns them."""
        return [TensorInfo.of(tensor) for tensor in self.plan.outputs]

    def _names(self) -> tuple[Sequence[str], Sequence[str]]:
        return [tensor.name for tensor in self.plan.inputs], [tensor.name for tensor in self.plan.outputs]


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The array type that each call checks for an input, or allocates for an output; computed once.

    A size of -1 is not checked.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    limits: tuple[int, ...] = ()  # the least and the greatest element of indices

    @staticmethod
    def of(info: TensorInfo, limits: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> ArrayType:
        """Return the type of a tensor; `limits`: those of inputs that are used as indices, by name."""
        return ArrayType(info.name, tuple(info.shape), info.dtype, limits.get(info.name, ()))

    def accept(self, array: Any) -> Array:
        """Return an input as a dense array of this type, copied only if necessary.

        Raises:
            InputError: it has another shape or type, an index is out of range, or it is not in the CPU's memory.
        """
        if type(array) is np.ndarray:
            found: Array = array
        else:
            found = np.asarray(array) if isinstance(array, _NUMPY) else self._import(array)
        is_native = found.dtype == self.dtype
        if not self._fits(found.shape) or not (is_native or found.dtype.newbyteorder("=") == self.dtype):
            text = _type_text(found.dtype, found.shape)
            raise InputError(f"it is {text}", f"input {self.name!r}", _type_text(self.dtype, self.shape))
        if self.limits:
            self.check_limits(found)
        flags = found.flags
        if is_native and flags.c_contiguous and flags.aligned:
            return found
        return np.array(found, self.dtype, order="C")

    def check_limits(self, array: Array) -> None:
        """Raise `InputError` if an element is not within the limits."""
        low, high = self.limits
        # A list of a few takes less than a microsecond.
        numbers = array.reshape(-1).tolist() if array.size <= FEW else (array.min(), array.max())
        if wrong := [number for number in numbers if not low <= number <= high]:
            raise InputError(f"it has the index {wrong[0]}", f"input {self.name!r}", f"{low} to {high}")

    def _fits(self, shape: tuple[int, ...]) -> bool:
        if shape == self.shape:
            return True
        return len(shape) == len(self.shape) and all(n in (-1, m) for n, m in zip(self.shape, shape, strict=True))

    def _import(self, array: Any) -> Array:
        """Return another library's array as a NumPy array, without a copy."""
        where, expected = f"input {self.name!r}", _type_text(self.dtype, self.shape)
        if not hasattr(array, "__dlpack__"):
            raise InputError(
                f"it is of type {type(array).__name__}",
                where,
                f"{expected} as an array of NumPy, or one that supports DLPack",
            )
        try:
            found: Array = np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"it can't be read through DLPack: {error}", where, f"{expected} in this machine's memory"
            ) from error
        return found


def _check_feeds(feeds: object, names: Sequence[str], defaults: Collection[str]) -> None:
    """Raise `InputError` unless `feeds` has an array for each name without a default, and for no other names."""
    expected = f"an array for each of {quoted(names)}"
    if not isinstance(feeds, Mapping):
        raise InputError(f"the feeds are of type {type(feeds).__name__}", expected=f"a dict with {expected}")
    if unknown := [name for name in feeds if name not in names]:
        raise InputError(f"there is no input {unknown[0]!r}", expected=expected)
    if missing := [name for name in names if name not in feeds and name not in defaults]:
        given = f"only {quoted(list(feeds))} is given" if feeds else "no input is given"
        raise InputError(f"input {missing[0]!r} is missing: {given}", expected=expected)


def _type_text(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    try:
        name = DType.of(dtype.newbyteorder("=")).value
    except KeyError:
        name = str(dtype)
    return f"{name}[{','.join('?' if n < 0 else str(n) for n in shape)}]"
