"""Checks of the field values of option records: a Python caller may pass values of any type."""

import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from korch.errors import OptionError

Ranges = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Per field: whether a value is in range, and the text that describes the range."""

_KINDS: Mapping[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a text"),
    Path: (Path, "a path"),
    type(None): (type(None), "None"),
}


def check_fields(record: object, ranges: Ranges) -> None:
    """Check each field of a dataclass object against its annotation, and then against its range.

    `ranges`: the ranges by field name, for the fields that have one; every range must exclude NaN.

    Raises:
        OptionError: a value has the wrong type or is out of range; the text names the field.
    """
    for name, hint in typing.get_type_hints(type(record)).items():
        _check_kind(name, getattr(record, name), hint)
    for name, (is_fit, expected) in ranges.items():
        value = getattr(record, name)
        if value is not None and not is_fit(value):
            raise OptionError(f"the value {value} is out of range", f"option {flag_of(name)}", expected)


def flag_of(name: str) -> str:
    """Return the name of a field as users write it, without the unit."""
    return name.removesuffix("_s")


def _check_kind(name: str, value: object, hint: Any) -> None:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        is_fit, expected = value in choices, " or ".join(map(repr, choices))
    else:
        kinds = typing.get_args(hint) or (hint,)
        is_fit = any(_is_of(value, kind) for kind in kinds)
        expected = " or ".join(map(_noun, kinds))
    if not is_fit:
        raise OptionError(f"the value is {value!r}", f"option {flag_of(name)}", expected)


def _noun(kind: type) -> str:
    if kind in _KINDS:
        return _KINDS[kind][1]
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def _is_of(value: object, kind: type) -> bool:
    if kind not in _KINDS:
        return isinstance(value, typing.get_origin(kind) or kind)
    return isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))
