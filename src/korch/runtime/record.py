"""A built plan as data: the content of plan.json and steps.json, which `korch explain` prints.

The records hold only strings and numbers, so that a plan can be read without the model, the providers
or the solver. `to_json` and `from_json` are inverse to each other, as are `members` and `from_members`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from korch.errors import ArtifactError
from korch.primitive.op import Array
from korch.primitive.types import DType, ValueType
from korch.records import from_json, plain, read_object, record_of, to_json

PLAN = "plan.json"
STEPS = "steps.json"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A model input or output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, type_: ValueType) -> TensorRecord:
        """Return the record of a named type."""
        return TensorRecord(name, type_.dtype.value, type_.shape)

    @property
    def type(self) -> ValueType:
        """The shape and element type as a `ValueType`."""
        return ValueType(self.shape, DType(self.dtype))


@dataclass(frozen=True, slots=True)
class PortRecord:
    """An input or output buffer of a kernel.

    Attributes:
        value: the value's id in the model's graph.
        type: its type, as text.
        layout: its layout, as text.
        place: ARENA, CONSTANT, INPUT or OUTPUT.
        at: the offset in the arena in bytes, or the index among the constants, inputs or outputs.
        offset: for a part of a model output, its distance from the begin of the output, in bytes.
    """

    value: int
    type: str
    layout: str
    place: str
    at: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One kernel of the plan, or a concatenation in place, for which no kernel runs.

    Attributes:
        symbol: its name in the library; empty if no kernel runs.
        provider: the provider that made it.
        variant: the provider's name for this implementation.
        candidate: the candidate's key.
        primitives: the primitives that it computes, as text.
        origins: the model's nodes and the rules that its primitives came from.
        inputs: the buffers that it reads.
        outputs: the buffers that it writes.
        cost_ns: measured time, or the bound if it was not measured.
        bound_ns: the lower bound of the time of any kernel for this candidate.
        is_measured: whether `cost_ns` was measured.
        size_bytes: bytes that it must read and write.
        work_flop: floating-point operations of its primitives.
        workspace_bytes: size of its scratch memory.
    """

    symbol: str
    provider: str
    variant: str
    candidate: str
    primitives: str
    origins: tuple[str, ...]
    inputs: tuple[PortRecord, ...]
    outputs: tuple[PortRecord, ...]
    cost_ns: float
    bound_ns: float
    is_measured: bool
    size_bytes: int
    work_flop: int
    workspace_bytes: int

    @property
    def runs(self) -> bool:
        """Whether a kernel runs."""
        return bool(self.symbol)


@dataclass(frozen=True, slots=True)
class StepRecords:
    """The content of steps.json."""

    steps: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True)
class StepSymbols:
    """What plan.json has for the steps: their symbols."""

    steps: tuple[str, ...]


class StoredSteps(Sequence[StepRecord]):
    """The steps in a file, which are read when they are needed: not to load a plan and to run it."""

    def __init__(self, text: bytes, symbols: tuple[str, ...]) -> None:
        """Keep the text of steps.json, and the symbols that the steps must have."""
        self.text, self.symbols = text, symbols

    @cached_property
    def _steps(self) -> tuple[StepRecord, ...]:
        found = from_json(StepRecords, self.text, STEPS).steps
        if tuple(step.symbol for step in found) != self.symbols:
            raise ArtifactError("it has other kernels than plan.json", STEPS, hint="Build the artifact again")
        return found

    def __getitem__(self, i: Any) -> Any:
        return self._steps[i]

    def __len__(self) -> int:
        return len(self.symbols)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._steps == tuple(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model that the plan was built from.

    Attributes:
        path: its file, or "".
        sha256: the file's SHA-256, or "".
        defaults: the elements of the inputs that need not be given, by name, in base64.
        limits: the least and the greatest element of the inputs that are used as indices, by name.
    """

    path: str = ""
    sha256: str = ""
    defaults: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def with_defaults(self, arrays: Mapping[str, Array]) -> ModelRecord:
        """Return the record with these elements of inputs."""
        return replace(self, defaults={n: base64.b64encode(a.tobytes()).decode() for n, a in arrays.items()})


@dataclass(frozen=True, slots=True)
class HostNodeRecord:
    """A node that the host runs."""

    node: str  # its name
    reason: str  # why Korch does not run it
    engine: str  # the engine that runs it
    checked: str = "not checked"  # how the engine's result was checked, or why it was not


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """The time that threads wait before one kernel for another one.

    If `step` and `waited` are the same, the threads wait at the end of the kernel for its last thread.
    """

    step: int  # the index in the plan of the kernel that waits
    waited: int  # the index in the plan of the kernel that it waits for
    share: float  # the share of waiting in the time of all threads


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """How long threads wait in a simulated run."""

    share: float  # the share of waiting in the time of all threads
    runs_tasks: bool  # whether some kernels run as tasks
    waits: tuple[WaitRecord, ...]  # the longest waits


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A built plan.

    Attributes:
        korch_version: the version of Korch that built it.
        model: the model that it was built from.
        inputs: the model's inputs.
        outputs: the model's outputs.
        threads: OpenMP threads of a run.
        steps: the kernels in the order in which they run.
        opens: names of shared libraries that the kernels open themselves.
        arena_bytes: size of the memory for intermediate values.
        arena_bound_bytes: lower bound of the size of any arena.
        weights_bytes: size of the packed constants.
        certificate: the solver's status, objective, bound and gap.
        options: the options of the build.
        target: the machine that it was built for.
        waiting: how long its threads wait in a simulated run; None for one thread, or if it is not known.
        in_place: outputs that may lie in the memory of an input, with this input: pairs of positions.
        extended: outputs that are a session's states with rows appended, each with the input: pairs of positions.
    """

    korch_version: str
    model: ModelRecord
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    threads: int
    steps: Sequence[StepRecord]
    arena_bytes: int
    arena_bound_bytes: int
    weights_bytes: int
    certificate: dict[str, Any]
    options: dict[str, Any]
    target: dict[str, Any]
    opens: tuple[str, ...] = ()
    waiting: WaitingRecord | None = None
    in_place: tuple[tuple[int, ...], ...] = ()
    extended: tuple[tuple[int, ...], ...] = ()

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbol of each step."""
        return self.steps.symbols if isinstance(self.steps, StoredSteps) else tuple(step.symbol for step in self.steps)

    @property
    def kernel_count(self) -> int:
        """The number of steps that run a kernel."""
        return sum(map(bool, self.symbols))

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> PlanRecord:
        """Return the record from the text that `to_json` returned.

        Raises:
            ArtifactError: the text is not such a record.
        """
        return from_json(PlanRecord, text, PLAN)

    def members(self) -> dict[str, bytes]:
        """Return the texts of plan.json and steps.json by their names."""
        plan = to_json({**plain(replace(self, steps=())), "steps": self.symbols})
        if isinstance(self.steps, StoredSteps):
            return {PLAN: plan.encode(), STEPS: self.steps.text}
        return {PLAN: plan.encode(), STEPS: to_json({"steps": self.steps}).encode()}

    @staticmethod
    def from_members(plan: bytes, steps: bytes) -> PlanRecord:
        """Return the record from the texts that `members` returned.

        Raises:
            ArtifactError: the text of the plan is not such a record; that of the steps is not read yet.
        """
        data = read_object(plan, PLAN)
        symbols = record_of(StepSymbols, {"steps": data.get("steps")}, PLAN).steps
        found = record_of(PlanRecord, {**data, "steps": []}, PLAN)
        return replace(found, steps=StoredSteps(steps, symbols))
