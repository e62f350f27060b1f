"""Command-line flags for the fields of `Options`; each command has the flags that it uses."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection, Sequence
from typing import Any

from korch.options import Options, flagged_fields

RENAMED = {"budget_s": "budget", "superopt_s": "superopt"}
"""The flags whose names omit the unit of the field; the help text names the unit."""


def add_options(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add one flag for each named field of `Options`; for all flagged fields if no names are given."""
    group = parser.add_argument_group("options")
    hints = typing.get_type_hints(Options)
    for field in flagged_fields():
        if names is not None and field.name not in names:
            continue
        flag = "--" + RENAMED.get(field.name, field.name).replace("_", "-")
        text = field.metadata["help"]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if hints[field.name] is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            group.add_argument(flag, dest=field.name, action=action, default=default, help=text)
            continue
        kind, choices = _flag_type(hints[field.name])
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            flag,
            dest=field.name,
            type=kind,
            choices=choices,
            default=default,
            metavar=None if choices else kind.__name__.upper(),
            help=text + shown,
        )


def _flag_type(hint: Any) -> tuple[type, Sequence[Any] | None]:
    if typing.get_origin(hint) is typing.Literal:
        values = typing.get_args(hint)
        return type(values[0]), values
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return hint, None


def options_of(parsed: argparse.Namespace) -> Options:
    """Return the options that the flags set; options without a flag in this command have their defaults."""
    return Options(**{f.name: getattr(parsed, f.name) for f in flagged_fields() if hasattr(parsed, f.name)})
