"""Frozen records <-> JSON: the functions that write and read all records of an artifact.

The fields of the dataclasses define the JSON. `from_json` reads the output of `to_json`. It refuses
objects with unknown fields or with values of other types. Only fields with a default may be missing.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from korch.errors import ArtifactError

MOST_NESTED = 64
"""Most levels of nested lists and objects in an artifact's JSON; those that we write have fewer than ten."""

T = TypeVar("T")


def to_json(data: object) -> str:
    """Return records, mappings, sequences and scalars as indented JSON text."""
    return json.dumps(plain(data), indent=1, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str | bytes, where: str) -> T:
    """Return the record of a class from the text that `to_json` wrote.

    Raises:
        ArtifactError: the text is not such a record.
    """
    return record_of(kind, read_object(text, where), where)


def record_of(kind: type[T], data: object, where: str) -> T:
    """Return the record of a class from its JSON object in the file `where`.

    Raises:
        ArtifactError: the object is not such a record.
    """
    try:
        return read_record(kind, data, where.partition(".")[0])
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"it can't be read: {error}", where=where, hint="Build the artifact again") from error


def read_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a text, which may be damaged or forged.

    Raises:
        ArtifactError: the text is not a JSON object, or its parts are nested too deeply.
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


def plain(data: Any) -> Any:
    """Return `data` converted to JSON types; infinity and NaN, which JSON does not have, become text."""
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


def read_record(kind: type[T], data: object, where: str) -> T:
    """Return the record of a class from its JSON object, as `plain` makes it.

    Raises:
        ValueError: the data has other fields, or a value has another type.
    """
    try:
        found: T = _reader(kind)(data)  # type: ignore[arg-type]
    except _OtherError as error:
        raise ValueError(f"{where}{''.join(reversed(error.path))} {error.what}") from error
    return found


class _OtherError(Exception):
    """A value is not of its type; `path` says where it is, from the inside to the outside."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path = what, list[str]()


Reader = Callable[[Any], Any]
"""Returns the value of one type from its JSON form, or raises `_OtherError`."""


@cache
def _reader(kind: Any) -> Reader:
    """Return the reader of a type: an artifact has tens of thousands of values, but few types."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return partial(_read_fields, kind)
    if origin is UnionType:
        read = _reader(next(argument for argument in arguments if argument is not NoneType))
        return lambda data: None if data is None else read(data)
    if origin in (tuple, Sequence):
        return partial(_read_list, _reader(arguments[0]))
    if origin in (dict, Mapping):
        return partial(_read_mapping, _reader(arguments[1]), origin.__name__)
    if kind is Any:
        return lambda data: data
    if isinstance(kind, type) and issubclass(kind, Enum):
        return partial(_read_choice, {member.value: member for member in kind}, kind.__name__)
    if origin is Literal:
        return partial(_read_choice, {choice: choice for choice in arguments}, str(arguments))
    return partial(_read_scalar, kind)


@cache
def _fields(kind: Any) -> tuple[dict[str, tuple[Any, Reader]], set[str]]:
    """Return the types of a record's fields and their readers, and the names of those without a default."""
    hints, missing = get_type_hints(kind), dataclasses.MISSING
    fields = dataclasses.fields(kind)
    needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
    return {f.name: (hints[f.name], _reader(hints[f.name])) for f in fields}, needed


def _read_fields(kind: Any, data: Any) -> Any:
    readers, needed = _fields(kind)  # not before: records may have fields of their own type
    if type(data) is not dict:
        raise _OtherError(f"is {data!r}; expected an object")
    if wrong := needed - data.keys() or data.keys() - readers.keys():
        text = "has the unknown field" if wrong <= data.keys() else "does not have the field"
        raise _OtherError(f"{text} {', '.join(sorted(wrong))}")
    found = {}
    for name, value in data.items():
        hint, read = readers[name]
        try:
            found[name] = value if type(value) is hint else read(value)  # most values are numbers and texts
        except _OtherError as error:
            error.path.append(f".{name}")
            raise
    return kind(**found)


def _read_list(read: Reader, data: Any) -> tuple[Any, ...]:
    if type(data) is not list:
        raise _OtherError("is no list")
    found: list[Any] = []
    try:
        for value in data:
            found.append(read(value))  # its length says where an error is
    except _OtherError as error:
        error.path.append(f"[{len(found)}]")
        raise
    return tuple(found)


def _read_mapping(read: Reader, name: str, data: Any) -> dict[str, Any]:
    if type(data) is not dict:
        raise _OtherError(f"is {data!r}; expected {name}")
    found = {}
    for key, value in data.items():
        try:
            found[key] = read(value)
        except _OtherError as error:
            error.path.append(f".{key}")
            raise
    return found


def _read_choice(choices: Mapping[Any, Any], expected: str, data: Any) -> Any:
    if isinstance(data, list | dict) or data not in choices:
        raise _OtherError(f"is {data!r}; expected {expected}")
    return choices[data]


def _read_scalar(kind: type, data: Any) -> Any:
    if kind is float and (type(data) is int or data in ("inf", "-inf", "nan")):
        return float(data)
    if type(data) is not kind:
        raise _OtherError(f"is {data!r}; expected {kind.__name__}")
    return data
