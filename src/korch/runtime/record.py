"""A built plan as data: what plan.json holds, and `korch explain` prints.

Plain records of strings and numbers, so that a plan can be read without the model, the providers
or the solver. `to_json` and `from_json` are inverse.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from korch.errors import ArtifactError
from korch.primitive.types import DType, ValueType


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
        """Its type."""
        return ValueType(self.shape, DType(self.dtype))


@dataclass(frozen=True, slots=True)
class PortRecord:
    """What a kernel reads or writes.

    Attributes:
        value: the value's id in the model's graph.
        type: its type, as text.
        layout: its layout, as text.
        place: ARENA, CONSTANT, INPUT or OUTPUT.
        at: the offset in the arena in bytes, or the position among its like.
        offset: of a piece of a model output, how far from its begin, in bytes.
    """

    value: int
    type: str
    layout: str
    place: str
    at: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One kernel of the plan, or a concatenation in place, for which none runs.

    Attributes:
        symbol: its name in the library; empty if nothing runs.
        provider: who made it.
        variant: what tells the provider's ways of running it apart.
        candidate: the candidate's key.
        primitives: the text form of what it computes.
        origins: the model's nodes and the rules that its primitives came from.
        inputs: what it reads.
        outputs: what it writes.
        cost_ns: measured time, or the bound if it was not measured.
        bound_ns: no kernel for this candidate can be faster.
        is_measured: whether `cost_ns` was measured.
        size_bytes: bytes that it must read and write.
        work_flop: floating-point operations of its primitives.
        workspace_bytes: scratch memory.
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
class ModelRecord:
    """The model that the plan was built from: its file (or "") and the file's SHA-256 (or "")."""

    path: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A built plan.

    Attributes:
        korch_version: the version that built it.
        model: what it was built from.
        inputs: the model's inputs.
        outputs: the model's outputs.
        threads: OpenMP threads of a run.
        steps: the kernels in the order in which they run.
        libraries: shared libraries that the kernels call, as the compiler's -l names them.
        arena_bytes: memory for what kernels hand to each other.
        arena_bound_bytes: no arena can be smaller.
        weights_bytes: the packed constants.
        certificate: the solver's status, objective, bound and gap.
        options: the options of the build.
        target: the machine that it was built for.
    """

    korch_version: str
    model: ModelRecord
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    threads: int
    steps: tuple[StepRecord, ...]
    libraries: tuple[str, ...]
    arena_bytes: int
    arena_bound_bytes: int
    weights_bytes: int
    certificate: dict[str, Any]
    options: dict[str, Any]
    target: dict[str, Any]

    @property
    def kernel_count(self) -> int:
        """How many of the steps run a kernel."""
        return sum(step.runs for step in self.steps)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> PlanRecord:
        """Return the record that `to_json` gives as `text`.

        Raises:
            ArtifactError: there is none.
        """
        try:
            return _read(PlanRecord, read_object(text, "plan.json"), "plan")
        except (ValueError, TypeError) as error:
            raise ArtifactError(
                f"it can't be read: {error}", where="plan.json", hint="Build the artifact again"
            ) from error


MOST_NESTED = 64
"""Levels of lists and objects in what an artifact holds; ours have less than ten."""


def read_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Return a JSON object that a file holds, which anybody may have written.

    Raises:
        ArtifactError: there is none, or its parts are nested too deeply for those who read it.
    """
    try:
        data = json.loads(text)
        level = [data]
        for _ in range(MOST_NESTED):
            lists = [
                part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)
            ]
            level = [part for parts in lists for part in parts]
        if level or not isinstance(data, dict):
            raise ValueError("it is no object, or its parts are nested too deeply")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"it can't be read: {error}", where, hint="Build the artifact again") from error
    return data


def to_json(data: Any) -> str:
    """Return records, mappings, sequences and scalars as indented JSON text."""
    return json.dumps(plain(data), indent=1, allow_nan=False) + "\n"


def plain(data: Any) -> Any:
    """Return `data` as JSON's types; what JSON has no word for (infinity, say) becomes text."""
    match data:
        case Enum():
            return plain(data.value)
        case None | bool() | int() | str():
            return data
        case float():
            return data if math.isfinite(data) else str(data)
        case Mapping():
            return {str(plain(key)): plain(value) for key, value in data.items()}
        case Sequence() | set() | frozenset():
            return [plain(item) for item in data]
        case _ if dataclasses.is_dataclass(data):
            return {f.name: plain(getattr(data, f.name)) for f in dataclasses.fields(data)}
        case _ if hasattr(data, "tolist"):  # NumPy's scalars and arrays
            return plain(data.tolist())
        case Path():
            return str(data)
        case _:
            raise TypeError(f"a {type(data).__name__} can't be written as JSON")


T = TypeVar("T")


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a record's fields; to find them takes longer than to read a record."""
    return get_type_hints(kind)


def _read(kind: type[T], data: Any, where: str) -> T:
    """Return the `kind` that `plain` gives as `data`."""
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise ValueError(f"{where} does not have the fields {', '.join(names)}")
        hints = _hints(kind)
        return kind(**{name: _read(hints[name], data[name], f"{where}.{name}") for name in names})
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where} is no list")
        item = get_args(kind)[0]
        return tuple(_read(item, x, f"{where}[{i}]") for i, x in enumerate(data))  # type: ignore[return-value]
    expected = origin or kind
    if expected is float and isinstance(data, str):
        return float(data)  # type: ignore[return-value]
    if expected is float and type(data) is int:
        return float(data)  # type: ignore[return-value]
    if type(data) is not expected:
        raise ValueError(f"{where} is {data!r}; expected {expected.__name__}")
    return data
