"""Turns an error of PyTorch's exporter into one clear error that names the operator and the module."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from korch.errors import KorchError, UnsupportedError, excerpt

_SWITCHES = ("train", "training", "dropout_p", "p", "dropout")
"""Arguments that can turn an operator's random numbers off."""

_ON_DATA = ("DataDependentOutputException", "DynamicOutputShapeException", "PendingUnbackedSymbolNotFound")
"""Errors of operators whose results PyTorch can't describe without the elements of their tensors."""


def export_trouble(error: BaseException, program: Any, name: str) -> KorchError:
    """Return the error for a module that PyTorch could not export or translate.

    `program`: the program that PyTorch was translating; None if it was tracing.
    """
    if isinstance(error, KorchError):
        return error
    messages = [str(e) for e in _chain(error)]
    for text in messages:
        if found := re.search(r"No ONNX function found for <OpOverload\(op='([\w.:]+)'", text):
            path = _path_of_operator(found[1], program)
            return UnsupportedError(
                f"PyTorch has no translation of the operator {found[1]} to ONNX",
                where=f"module {name}{path}",
                hint="Leave this part to PyTorch: torch.compile(module, backend='korch') does so",
            )
    last = list(_chain(error))[-1]
    kind, text = type(last).__name__, _first_line(str(error))
    if kind in _ON_DATA or "data-dependent" in str(error) or "data dependent" in str(error):
        if hasattr(last, "func"):
            text = f"the operator {last.func} returns a number or a size that follows from them"
        elif kind in _ON_DATA:
            text = "a size follows from them"
        return UnsupportedError(
            f"what it does depends on the values of a tensor: {text}{_user_line(str(error))}",
            where=f"module {name}",
            expected="branches and sizes that are known without the values",
            hint="torch.compile(module, backend='korch') leaves such parts to PyTorch",
        )
    return UnsupportedError(
        f"PyTorch can't export it: {type(last).__name__}: {_first_line(str(last))}",
        where=f"module {name}",
        hint="torch.compile(module, backend='korch') leaves such parts to PyTorch",
    )


def random_operator(program: Any) -> tuple[str, str] | None:
    """Return the name and the module path of the first operator that draws random numbers."""
    for node in program.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _is_off(node):
            return str(node.target), path_of(node)
    return None


def _is_off(node: Any) -> bool:
    """Return whether an argument says that no random number is drawn."""
    names = [argument.name for argument in node.target._schema.arguments]
    values = {a.name: a.default_value for a in node.target._schema.arguments}
    values |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return any(name in values and not values[name] for name in _SWITCHES)


def _path_of_operator(operator: str, program: Any) -> str:
    nodes = [] if program is None else program.graph.nodes
    base = operator.split(".")[-1].strip("_")
    for node in nodes:
        if node.op == "call_function" and base in str(node.target):
            return path_of(node)
    return ""


def path_of(node: Any) -> str:
    """Return where in the module a node comes from: ": encoder.layer.0"."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path and path != "module"]
    return f": {paths[-1].removeprefix('module.')}" if paths else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return excerpt(lines[0] if lines else "no reason given").rstrip(".")


def _user_line(text: str) -> str:
    """Return the line of the user's code that PyTorch names, if it names one."""
    found = re.search(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(.+)', text)
    return f" (at {found[1]}:{found[2]}, {found[4].strip()})" if found else ""
