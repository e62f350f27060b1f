"""Artifact -> a callable that takes and returns arrays.

It is a thin wrapper around the native plan: it checks names, shapes and types, copies only inputs that are
not dense, and allocates the outputs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from korch.errors import ArtifactError, InputError
from korch.primitive.op import Array
from korch.runtime.artifact import Archive, Artifact, archive_of, read_artifact
from korch.runtime.library import Handle, Library, load_plans
from korch.runtime.output_memory import LARGE, OutputMemory
from korch.runtime.record import PlanRecord
from korch.runtime.runnable import ArrayType, PlanExecutable, TensorInfo, Timing
from korch.system.alignment import address_of, aligned_bytes, short_lived_array

if TYPE_CHECKING:
    from korch.runtime.report import Report

T = TypeVar("T")

NO_MEMORY: Mapping[int, Array] = MappingProxyType({})


class Executable(PlanExecutable):
    """A plan that can run: call it with arrays, or use its `run` like that of an ONNX Runtime session.

    It may be called from several threads; the calls wait for each other. Inputs are NumPy arrays, or any
    other arrays that support DLPack and are in the CPU's memory. Outputs are NumPy arrays.

    Attributes:
        is_one_of_several: whether it is one of several plans that share kernels, and can't be saved alone.
    """

    def __init__(self, artifact: Artifact, library: Library | None = None) -> None:
        """Load the kernels and prepare each.

        Args:
            artifact: the artifact that `korch.runtime.build` made.
            library: the plan among those that were loaded together, if there are several.

        Raises:
            ArtifactError: the kernels can't be loaded here, or do not belong to the plan.
            ProviderError: a kernel can't be set up.
        """
        artifact.requirements.check()
        plan = artifact.plan
        self.is_one_of_several = library is not None
        if library is None:
            (library,) = load_plans(artifact.objects)
        _check_interface(library, artifact)
        self._artifact = artifact
        self._handle = Handle(library, artifact.weights, plan.threads)
        self._inputs = tuple(ArrayType.of(info, plan.model.limits) for info in self.get_inputs())
        self._outputs = tuple((ArrayType.of(TensorInfo.of(tensor)), tensor.type.size_bytes) for tensor in plan.outputs)
        self._memory: dict[int, OutputMemory] = {}  # of large outputs, by position
        self._known_names = tuple(t.name for t in plan.inputs), tuple(t.name for t in plan.outputs)

    @property
    def artifact(self) -> Artifact:
        """The artifact that it was made from, with the current report."""
        return self._artifact

    @property
    def report(self) -> Report:
        """How the plan was found; `save` stores it."""
        return self._artifact.report

    @report.setter
    def report(self, report: Report) -> None:
        self._artifact = self._artifact.with_report(report)

    @property
    def plan(self) -> PlanRecord:
        """The plan: its kernels in order, and all other facts recorded about it."""
        return self._artifact.plan

    @property
    def sources(self) -> Mapping[str, str]:
        """The sources by file name."""
        return self._artifact.sources

    def compute(
        self, arrays: Sequence[Any], into: Mapping[int, Array] = NO_MEMORY, known: Collection[int] = ()
    ) -> tuple[Array, ...]:
        """Run the plan on an array for each input.

        Args:
            arrays: the inputs.
            into: by position, the memory of outputs, each the memory of an input that the plan overwrites.
            known: the positions of inputs that are arrays of the plan's types, so that they need no checks.
        """
        inputs = self._accept(arrays, known)
        outputs = self._allocate(into)
        self._handle.run(_addresses(inputs), _addresses(outputs))
        return outputs

    @property
    def in_place(self) -> Sequence[tuple[int, ...]]:
        """The outputs that may lie in the memory of an input, with this input."""
        return self.plan.in_place

    def run_into(self, feeds: Mapping[str, Any], into: Mapping[int, Array]) -> Sequence[Array]:
        """Return all outputs; `into` has the memory of some of `in_place`, that of their inputs."""
        return self.compute(self._fed(feeds, self._known_names[0]), into)

    def bind(self, *arrays: Any) -> Callable[[], tuple[Array, ...]]:
        """Prepare runs that read the same arrays and write the same outputs, like ONNX Runtime's `IOBinding`.

        A run takes some microseconds less than a call, because only indices are checked, and nothing is allocated.

        Args:
            arrays: one for each input, in the model's order. Each run reads their current content.

        Returns:
            A function that runs the model and returns its outputs: the same arrays each time, with new content.

        Raises:
            InputError: an array has another shape or type or would be copied, or there are too few or too many.
        """
        arrays = tuple(self.complete(arrays))
        inputs = self._accept(arrays)
        for found, array, type_ in zip(inputs, arrays, self._inputs, strict=True):
            given = array if isinstance(array, np.ndarray) else type_.accept(array)  # a copy shares no memory
            if found.size and not np.may_share_memory(found, given):
                expected = "a dense array of the input's type, aligned to its elements"
                raise InputError("it would have to be copied for each run", f"input {type_.name!r}", expected)
        # Long-lived, so large ones ask for huge pages, which takes longer to allocate.
        outputs = tuple(
            aligned_bytes(size_bytes).view(type_.dtype).reshape(type_.shape) for type_, size_bytes in self._outputs
        )
        run = self._handle.bound(_addresses(inputs), _addresses(outputs))
        checks = [partial(t.check_limits, a) for t, a in zip(self._inputs, inputs, strict=True) if t.limits]
        return partial(_run_bound, run, checks, inputs, outputs)

    def stopwatch(self, arrays: Sequence[Any]) -> Callable[[], int]:
        """Return a function that runs the model once on these arrays and returns the nanoseconds.

        As in a session, rows are appended to states in their own memory, which is a copy here.
        """
        if not self.plan.extended:
            return super().stopwatch(arrays)
        inputs, states = self._with_states(self._accept(self.complete(arrays)))

        def once() -> int:
            start = time.perf_counter_ns()
            self.compute(inputs, states)
            return time.perf_counter_ns() - start

        return once

    def time(self, arrays: Sequence[Any], repeat: int) -> Timing:
        """Run `repeat` times, and return the time of each run and of each kernel in it."""
        inputs, states = self._with_states(self._accept(arrays))
        outputs = self._allocate(states)
        addresses = _addresses(inputs), _addresses(outputs)
        run_ns, kernel_ns = [], []
        for _ in range(repeat):
            start = time.perf_counter_ns()
            kernel_ns.append(tuple(self._handle.run_timed(*addresses)))
            run_ns.append(time.perf_counter_ns() - start)
        return Timing(tuple(run_ns), tuple(kernel_ns))

    def hooked(self, arrays: Sequence[Any], hook: Callable[[Handle, Sequence[int], Sequence[int]], T]) -> T:
        """Call a hook that runs the plan itself, and return its result.

        Args:
            arrays: one for each input, in the model's order.
            hook: called with the plan, the address of each input, and the address of each output.

        Raises:
            InputError: an array has another shape or type, or there are too few or too many.
        """
        inputs, states = self._with_states(self._accept(arrays))
        outputs = self._allocate(states)
        return hook(self._handle, _addresses(inputs), _addresses(outputs))

    def archive(self) -> Archive:
        """Return the content of its file.

        Raises:
            ArtifactError: it is one of several plans that share kernels.
        """
        if self.is_one_of_several:
            raise ArtifactError(
                "one of several plans can't be saved without the others", hint="Save the executable that has them all"
            )
        return archive_of(self.artifact)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | IO[bytes]) -> Self:
        """Load a file that `save` wrote.

        Raises:
            ArtifactError: it can't be read, is damaged or tampered with, or needs another machine.
            ProviderError: a kernel can't be set up.
        """
        artifact = read_artifact(path)
        try:
            return cls(artifact)
        except ArtifactError as error:
            where = str(path) if isinstance(path, str | os.PathLike) else ""
            raise ArtifactError(error.what, where, error.expected, error.hint) from error

    def _names(self) -> tuple[Sequence[str], Sequence[str]]:
        return self._known_names

    def _accept(self, arrays: Sequence[Any], known: Collection[int] = ()) -> list[Array]:
        if len(arrays) != len(self._inputs):  # checked first, because most calls give all
            arrays = self.complete(arrays)
        pairs = enumerate(zip(self._inputs, arrays, strict=True))
        return [array if i in known else type_.accept(array) for i, (type_, array) in pairs]

    def _with_states(self, inputs: Sequence[Array]) -> tuple[Sequence[Array], Mapping[int, Array]]:
        """Return inputs with a copy of each state, and the copies by the output that has the state's memory."""
        copies = {given: inputs[given].copy() for _, given in self.plan.extended}
        own = [copies.get(i, array) for i, array in enumerate(inputs)]
        return own, {output: copies[given] for output, given in self.plan.extended}

    def _allocate(self, into: Mapping[int, Array] = NO_MEMORY) -> tuple[Array, ...]:
        return tuple(
            into[i] if i in into else self._output(i, type_, size_bytes)
            for i, (type_, size_bytes) in enumerate(self._outputs)
        )

    def _output(self, i: int, type_: ArrayType, size_bytes: int) -> Array:
        if size_bytes <= LARGE:
            return short_lived_array(type_.shape, type_.dtype, size_bytes)
        memory = self._memory.setdefault(i, OutputMemory())
        return memory.take(size_bytes).view(type_.dtype).reshape(type_.shape)


def _run_bound(
    run: Callable[[], None], checks: Sequence[Callable[[], None]], inputs: list[Array], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Run a plan on bound arrays; the inputs are an argument so that their memory stays alive."""
    for check in checks:
        check()
    run()
    return outputs


def _addresses(arrays: Sequence[Array]) -> list[int]:
    return [address_of(array) for array in arrays]


def _check_interface(library: Library, artifact: Artifact) -> None:
    """Check that the loaded plan is the one that is described, so that it gets only the pointers that it expects."""
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
        or library.kernels != plan.symbols
    ):
        raise ArtifactError("its kernels are not those that its plan describes")
