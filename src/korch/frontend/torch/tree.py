"""Converts nested arguments and results to flat tensors and back.

PyTorch's own tree library flattens and rebuilds tuples, lists, dicts and registered classes (such as
the outputs of `transformers`). Leaves that are not tensors are fixed when a module is exported: in
arguments they must be the same in every call, in results they are constants.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from korch.errors import InputError, quoted


@dataclass(frozen=True, eq=False)
class Arguments:
    """The form of a call: everything but the tensors."""

    keywords: tuple[str, ...]  # names of keyword arguments in their order
    spec: Any  # the tree of (positional arguments, keyword arguments)
    leaves: tuple[Any, ...]  # per leaf, its value if it is not a tensor, or None
    tensors: tuple[int, ...]  # positions of the leaves that are tensors

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Arguments, list[Any]]:
        """Return the form of a call, and its tensors."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        values = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return Arguments(tuple(kwargs), spec, values, places), [leaves[i] for i in places]

    def names(self, module: Any) -> list[str]:
        """Return a name for each tensor: the name of its parameter, and its path within the argument."""
        known = _positional_names(module)
        paths = [path for path, _ in pytree.tree_leaves_with_path(self._sample())]
        named = []
        for place in self.tensors:
            side, first, *rest = map(_step, paths[place])
            if side == "0" and int(first) < len(known):
                first = known[int(first)]
            named.append(".".join((first, *rest)))
        return named

    def _sample(self) -> Any:
        """Return a tree of this form without tensors."""
        return pytree.tree_unflatten(range(self.spec.num_leaves), self.spec)

    def nest(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the tensors of a call that has this form.

        Raises:
            InputError: the call has another form.
        """
        if set(kwargs) != set(self.keywords):
            raise InputError(
                f"it was called with the keyword arguments {quoted(kwargs)}",
                expected=quoted(self.keywords),
                hint="Call it as in the example inputs",
            )
        call = (tuple(args), {name: kwargs[name] for name in self.keywords})
        leaves, spec = pytree.tree_flatten(call)
        if spec != self.spec:
            raise InputError(
                f"its arguments are nested as {_shape(spec)}",
                expected=_shape(self.spec),
                hint="Call it as in the example inputs",
            )
        places = set(self.tensors)
        for i, (leaf, known) in enumerate(zip(leaves, self.leaves, strict=True)):
            if i not in places and not _same(leaf, known):
                raise InputError(
                    f"argument {i + 1} is {_describe(leaf)}",
                    expected=f"{known!r}, for which the module was optimized",
                    hint="What is no tensor is fixed by the example inputs",
                )
        return [leaves[i] for i in self.tensors]


@dataclass(frozen=True, eq=False)
class Results:
    """The form of what a module returns."""

    spec: Any  # the tree
    leaves: tuple[Any, ...]  # per leaf, its value if it is not a tensor, or None
    # per leaf, the number of its tensor, or -1 if it is not a tensor. A tensor may occur at several leaves.
    tensors: tuple[int, ...]
    names: tuple[str, ...]  # per tensor, the path of its first occurrence

    @staticmethod
    def of(result: Any) -> tuple[Results, list[Any]]:
        """Return the form of a result, and its distinct tensors."""
        pairs, spec = pytree.tree_flatten_with_path(result)
        leaves = [leaf for _, leaf in pairs]
        found: dict[int, int] = {}
        tensors, places, names = list[Any](), list[int](), list[str]()
        for path, leaf in pairs:
            if not isinstance(leaf, torch.Tensor):
                places.append(-1)
                continue
            if id(leaf) not in found:
                found[id(leaf)] = len(tensors)
                tensors.append(leaf)
                names.append(".".join(("output", *map(_step, path))))
            places.append(found[id(leaf)])
        values = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return Results(spec, values, tuple(places), tuple(names)), tensors

    def nest(self, tensors: Sequence[Any]) -> Any:
        """Return the result with these tensors."""
        leaves = [leaf if place < 0 else tensors[place] for leaf, place in zip(self.leaves, self.tensors, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, eq=False)
class Trees:
    """The forms of a module's arguments and results, and the tensors in them that its ONNX model takes and returns."""

    arguments: Arguments  # the form of a call
    results: Results  # the form of a result


def _step(key: Any) -> str:
    """Return a step into a tree as text: an index, a key or an attribute's name."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _positional_names(module: Any) -> list[str]:
    """Return the names of a module's positional parameters."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _same(leaf: Any, known: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return False
    return leaf is known or (type(leaf) is type(known) and bool(leaf == known))


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return "a tensor"
    return repr(leaf)


def _shape(spec: Any) -> str:
    """Return a tree as text, with a star for each leaf."""
    text = pytree.tree_unflatten(["*"] * spec.num_leaves, spec)
    return str(text).replace("'*'", "*")
