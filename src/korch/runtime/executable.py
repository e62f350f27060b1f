"""Artifact -> a callable that takes and gives arrays.

A thin caller of the native plan: it checks names, shapes and types, copies only what is not dense,
and allocates the outputs.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from korch.alignment import short_lived_bytes
from korch.errors import ArtifactError, InputError
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType
from korch.runtime.artifact import Artifact, artifact_bytes, read_artifact, write_artifact
from korch.runtime.library import Handle, Library, load_plans
from korch.runtime.record import PlanRecord, TensorRecord
from korch.runtime.text import executable_text, plan_facts

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A model input or output, described as ONNX Runtime's sessions do.

    Attributes:
        name: its name.
        shape: elements per axis.
        type: as ONNX Runtime writes it: "tensor(float)".
        dtype: the NumPy type.
    """

    name: str
    shape: list[int]
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
        run_ns: per run, from call to return.
        kernel_ns: per run, the time of each kernel.
    """

    run_ns: tuple[int, ...]
    kernel_ns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What each call needs to know of an input or output, computed once."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size_bytes: int
    type: ValueType

    @staticmethod
    def of(tensor: TensorRecord) -> _Tensor:
        type_ = tensor.type
        return _Tensor(tensor.name, type_.shape, type_.dtype.numpy, type_.size_bytes, type_)

    def allocate(self) -> Array:
        return short_lived_bytes(self.size_bytes).view(self.dtype).reshape(self.shape)


class Executable:
    """A plan that runs: call it with arrays, or use `run` as of an ONNX Runtime session.

    It may be called from several threads; the calls wait for each other. Arrays are NumPy's, or
    any others that speak DLPack and lie in this machine's memory; what it returns is NumPy's.

    Attributes:
        report: how the plan was found; `save` stores it.
    """

    def __init__(self, artifact: Artifact, library: Library | None = None) -> None:
        """Load the library and prepare each kernel.

        Args:
            artifact: what `korch.runtime.build` made.
            library: its plan, if that is one of several of a library that is loaded.

        Raises:
            ArtifactError: the library can't be loaded here, or is not the plan's.
            ProviderError: a kernel can't be set up.
        """
        artifact.requirements.check()
        plan = artifact.plan
        self._is_one_of_several = library is not None
        if library is None:
            (library,) = load_plans(artifact.library, plan.libraries)
        _check_interface(library, artifact)
        self._artifact = artifact
        self._handle = Handle(library, artifact.weights, plan.threads)
        self._inputs = tuple(map(_Tensor.of, plan.inputs))
        self._outputs = tuple(map(_Tensor.of, plan.outputs))
        self.report = artifact.report

    @property
    def artifact(self) -> Artifact:
        """What it was made from, with the report as it is now."""
        return self._reported()

    @property
    def plan(self) -> PlanRecord:
        """The kernels in order, and all else that is known of the plan."""
        return self._artifact.plan

    @property
    def sources(self) -> Mapping[str, str]:
        """The C++ sources by file name."""
        return self._artifact.sources

    def __repr__(self) -> str:
        return executable_text(self, plan_facts(self.plan, self.report))

    def get_inputs(self) -> list[TensorInfo]:
        """Describe the model's inputs, in the order in which a call takes them."""
        return [TensorInfo.of(tensor) for tensor in self.plan.inputs]

    def get_outputs(self) -> list[TensorInfo]:
        """Describe the model's outputs, in the order in which a call returns them."""
        return [TensorInfo.of(tensor) for tensor in self.plan.outputs]

    def __call__(self, *arrays: Any) -> tuple[Array, ...]:
        """Run the model.

        Args:
            arrays: one for each input, in the model's order.

        Returns:
            An array for each output, in the model's order.

        Raises:
            InputError: an array has another shape or type, or there are too few or too many.
            ProviderError: a kernel failed.
        """
        inputs = self._accept(arrays)
        outputs = self._allocate()
        self._handle.run(_addresses(inputs), _addresses(outputs))
        return outputs

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], run_options: None = None
    ) -> list[Array]:
        """Run the model as `onnxruntime.InferenceSession.run` does.

        Args:
            output_names: the outputs wanted, in this order; None for all.
            feeds: an array for each input, by name.
            run_options: for ONNX Runtime only; must be None.

        Raises:
            InputError: a name is unknown or missing, or an array has another shape or type.
            ProviderError: a kernel failed.
        """
        return run_by_name(self, self.plan, output_names, feeds, run_options)

    def time(self, arrays: Sequence[Any], repeat: int) -> Timing:
        """Run several times and take the time of each run and of each kernel in it.

        Args:
            arrays: one for each input, in the model's order.
            repeat: how often.

        Raises:
            InputError: an array has another shape or type, or there are too few or too many.
            ProviderError: a kernel failed.
        """
        inputs = self._accept(arrays)
        outputs = self._allocate()
        addresses = _addresses(inputs), _addresses(outputs)
        run_ns, kernel_ns = [], []
        for _ in range(repeat):
            start = time.perf_counter_ns()
            kernel_ns.append(tuple(self._handle.run_timed(*addresses)))
            run_ns.append(time.perf_counter_ns() - start)
        return Timing(tuple(run_ns), tuple(kernel_ns))

    def hooked(self, arrays: Sequence[Any], hook: Callable[[Handle, Sequence[int], Sequence[int]], T]) -> T:
        """Return what a hook gives that runs the plan itself.

        Args:
            arrays: one for each input, in the model's order.
            hook: given the plan, the address of each input, and that of each output.

        Raises:
            InputError: an array has another shape or type, or there are too few or too many.
        """
        inputs = self._accept(arrays)
        outputs = self._allocate()
        return hook(self._handle, _addresses(inputs), _addresses(outputs))

    def stopwatch(self, arrays: Sequence[Any]) -> Callable[[], int]:
        """Return a function that runs the model once on some arrays and gives its nanoseconds.

        Raises:
            InputError: an array has another shape or type, or there are too few or too many.
        """
        self._accept(arrays)

        def once() -> int:
            start = time.perf_counter_ns()
            self(*arrays)
            return time.perf_counter_ns() - start

        return once

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the executable to one file, which `load` reads.

        Raises:
            ArtifactError: the file can't be written; what was there before is unharmed. Or it is
                one of several plans, whose library is not its own.
        """
        write_artifact(self._whole(), path)

    def to_bytes(self) -> bytes:
        """Return what `save` would write; raise what it would."""
        return artifact_bytes(self._whole())

    def __reduce__(self) -> tuple[Callable[[bytes], Executable], tuple[bytes]]:
        """Pickle and copy it as the bytes of its artifact: a copy has memory of its own."""
        return _from_bytes, (self.to_bytes(),)

    def _whole(self) -> Artifact:
        if self._is_one_of_several:
            raise ArtifactError(
                "one of several plans can't be saved without the others", hint="Save the executable that has them all"
            )
        return self._reported()

    def _reported(self) -> Artifact:
        return replace(self._artifact, report=self.report)

    def _accept(self, arrays: Sequence[Any]) -> list[Array]:
        if len(arrays) != len(self._inputs):
            names = _list([tensor.name for tensor in self._inputs])
            raise InputError(f"it was called with {len(arrays)} arrays", expected=f"{len(self._inputs)}: {names}")
        return list(map(_accept, arrays, self._inputs))

    def _allocate(self) -> tuple[Array, ...]:
        return tuple(tensor.allocate() for tensor in self._outputs)


def run_by_name(
    call: Callable[..., Sequence[Any]],
    plan: PlanRecord,
    output_names: Sequence[str] | None,
    feeds: Mapping[str, Any],
    run_options: None = None,
) -> list[Any]:
    """Run a plan's executable as `onnxruntime.InferenceSession.run` does.

    Args:
        call: takes an array for each input and gives the outputs, both in the plan's order.
        plan: names them.
        output_names: the outputs wanted, in this order; None for all.
        feeds: an array for each input, by name.
        run_options: for ONNX Runtime only; must be None.

    Raises:
        InputError: a name is unknown or missing; or what the call raises.
    """
    if run_options is not None:
        raise InputError("run_options is for ONNX Runtime only", expected="None")
    names = [tensor.name for tensor in plan.inputs]
    check_feeds(feeds, names)
    offered = [tensor.name for tensor in plan.outputs]
    wanted = offered if output_names is None else list(output_names)
    if unknown := [name for name in wanted if name not in offered]:
        raise InputError(f"there is no output {unknown[0]!r}", expected=_list(offered))
    found = dict(zip(offered, call(*(feeds[name] for name in names)), strict=True))
    return [found[name] for name in wanted]


def check_feeds(feeds: object, names: Sequence[str]) -> None:
    """Raise `InputError` unless the feeds of a run are an array for each of some names."""
    expected = f"an array for each of {_list(names)}"
    if not isinstance(feeds, Mapping):
        raise InputError(f"the feeds are of type {type(feeds).__name__}", expected=f"a dict with {expected}")
    if unknown := [name for name in feeds if name not in names]:
        raise InputError(f"there is no input {unknown[0]!r}", expected=expected)
    if missing := [name for name in names if name not in feeds]:
        given = f"only {_list(list(feeds))} is given" if feeds else "no input is given"
        raise InputError(f"input {missing[0]!r} is missing: {given}", expected=expected)


def _from_bytes(content: bytes) -> Executable:
    return Executable(read_artifact(io.BytesIO(content)))


def load(path: str | os.PathLike[str]) -> Executable:
    """Load an artifact.

    Raises:
        ArtifactError: it can't be read, is damaged or tampered with, or needs another machine.
        ProviderError: a kernel can't be set up.
    """
    artifact = read_artifact(path)
    try:
        return Executable(artifact)
    except ArtifactError as error:
        raise ArtifactError(error.what, str(path), error.expected, error.hint) from error


def _accept(array: Any, tensor: _Tensor) -> Array:
    """Return an input as a dense array of the expected type, copied only if it must be."""
    is_numpy = isinstance(array, np.ndarray | np.generic)
    found = np.asarray(array) if is_numpy else import_array(array, tensor.name, str(tensor.type))
    dtype = tensor.dtype
    is_native = found.dtype == dtype
    if found.shape != tensor.shape or not (is_native or found.dtype.newbyteorder("=") == dtype):
        raise InputError(f"it is {_describe(found)}", where=f"input {tensor.name!r}", expected=str(tensor.type))
    flags = found.flags
    if is_native and flags.c_contiguous and flags.aligned:
        return found
    return np.array(found, dtype, order="C")


def import_array(array: Any, name: str, expected: str) -> Array:
    """Return what another library's array holds, without a copy.

    Raises:
        InputError: it does not speak DLPack, or not of this machine's memory.
    """
    where = f"input {name!r}"
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


def _describe(array: Array) -> str:
    try:
        name = DType.of(array.dtype.newbyteorder("=")).value
    except KeyError:
        name = str(array.dtype)
    return f"{name}[{','.join(map(str, array.shape))}]"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _addresses(arrays: Sequence[Array]) -> list[int]:
    return [array.__array_interface__["data"][0] for array in arrays]


def _check_interface(library: Library, artifact: Artifact) -> None:
    """Check that the library is the plan's: no pointer is passed that it does not expect."""
    plan = artifact.plan
    constants = tuple((f"c{i}", type_) for i, type_ in enumerate(artifact.weights.types))
    try:
        inputs, outputs = (tuple((t.name, t.type) for t in tensors) for tensors in (plan.inputs, plan.outputs))
    except ValueError:  # there is no such element type
        inputs = outputs = ()
    if (
        library.inputs != inputs
        or library.outputs != outputs
        or library.constants != constants
        or library.kernels != tuple(step.symbol for step in plan.steps)
    ):
        raise ArtifactError("its library is not the one that its plan describes")
