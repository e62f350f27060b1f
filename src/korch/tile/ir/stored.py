"""Tile programs <-> JSON. An object is a list of its class's name and its fields; a tuple begins with an empty name."""

import dataclasses
import json
from enum import Enum
from typing import Any

from korch.tile.ir import index, program, sort
from korch.tile.ir.program import TileProgram

KINDS: dict[str, type] = {
    name: kind
    for module in (index, program, sort)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum))
}
"""The classes of the parts of a program, by name."""


def stored_program(found: TileProgram) -> str:
    """Return a program as JSON."""
    return json.dumps(_plain(found))


def read_program(text: str) -> TileProgram:
    """Return the program that `stored_program` gave as `text`; it is not checked.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        found = _read(json.loads(text))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no tile program can be read: {error}") from error
    if not isinstance(found, TileProgram):
        raise ValueError("it is no tile program")
    return found


def _plain(part: Any) -> Any:
    if isinstance(part, Enum):
        return [type(part).__name__, part.name]
    if isinstance(part, tuple):
        return ["", *map(_plain, part)]
    if dataclasses.is_dataclass(part):
        return [type(part).__name__, *(_plain(getattr(part, field.name)) for field in dataclasses.fields(part))]
    return part


def _read(part: Any) -> Any:
    if not isinstance(part, list):
        return part
    name, *parts = part
    if not name:
        return tuple(map(_read, parts))
    kind = KINDS[name]
    return kind[parts[0]] if issubclass(kind, Enum) else kind(*map(_read, parts))
