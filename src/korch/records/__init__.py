"""Frozen records <-> JSON: the functions that write and read all records of an artifact.

The fields of the dataclasses define the JSON. `from_json` reads the output of `to_json`. It refuses
objects with unknown fields or with values of other types. Only fields with a default may be missing.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
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
    data = read_object(text, where)
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


@cache
def _fields(kind: type[Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the types of a record's fields, and the names of those without a default."""
    hints = get_type_hints(kind)
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
    return {field.name: hints[field.name] for field in fields}, needed


def read_record(kind: type[T], data: object, where: str) -> T:
    """Return the record of a class from its JSON object, as `plain` makes it.

    Raises:
        ValueError: the data has other fields, or a value has another type.
    """
    found: T = _read(kind, data, where)
    return found


def _read(kind: Any, data: Any, where: str) -> Any:
    """Return a value of type `kind` from its JSON form, as `plain` makes it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints, needed = _fields(kind)  # type: ignore[arg-type]
        if not isinstance(data, dict):
            raise ValueError(f"{where} is {data!r}; expected an object")
        if wrong := needed - data.keys() or data.keys() - hints.keys():
            text = "has the unknown field" if wrong <= data.keys() else "does not have the field"
            raise ValueError(f"{where} {text} {', '.join(sorted(wrong))}")
        return kind(**{name: _read(hints[name], data[name], f"{where}.{name}") for name in data})  # type: ignore[operator]
    if origin is UnionType:
        kinds = [argument for argument in arguments if argument is not NoneType]
        return None if data is None else _read(kinds[0], data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where} is no list")
        return tuple(_read(arguments[0], x, f"{where}[{i}]") for i, x in enumerate(data))
    if origin in (dict, Mapping) and isinstance(data, dict):
        return {key: _read(arguments[1], value, f"{where}.{key}") for key, value in data.items()}
    if origin is Literal and data in arguments:
        return data
    if isinstance(kind, type) and issubclass(kind, Enum) and data in [member.value for member in kind]:
        return kind(data)
    expected = Mapping if origin is Mapping else origin or kind
    if expected is float and (type(data) is int or data in ("inf", "-inf", "nan")):
        return float(data)
    if kind is not Any and type(data) is not expected:
        raise ValueError(f"{where} is {data!r}; expected {getattr(expected, '__name__', arguments)}")
    return data
