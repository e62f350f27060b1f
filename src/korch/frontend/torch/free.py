"""Exports an ExportedProgram with dynamic dimensions as ONNX for any of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from korch.errors import UnsupportedError
from korch.frontend.torch.export import Exported, export_call
from korch.ranges.form import Dimension, Sizes

MOST_KEPT = 16
"""For how many choices of sizes exported modules are cached; they share the module's weights."""


class FreeModule:
    """A module that takes tensors of several sizes.

    Attributes:
        dimensions: the free dimensions, each named by the first input that has it and its axis there.
        at: returns the module as ONNX for one size of each dimension; raises what `export_module` does.
    """

    def __init__(self, dimensions: tuple[Dimension, ...], at: Callable[[Sizes], Exported]) -> None:
        """Store the free dimensions and the function, whose last results are cached."""
        self.dimensions = dimensions
        self.at = lru_cache(MOST_KEPT)(at)

    @staticmethod
    def of(program: Any) -> FreeModule | None:
        """Return the module of a program whose inputs have dynamic dimensions, None if there are none.

        Raises:
            UnsupportedError: a dimension has no largest size, or is computed from another one.
        """
        if not isinstance(program, torch.export.ExportedProgram) or program.example_inputs is None:
            return None
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        inputs = [node for name in program.graph_signature.user_inputs if (node := nodes.get(str(name))) is not None]
        numbers: dict[Any, int] = {}
        dimensions: list[Dimension] = []
        axes: dict[tuple[int, int], int] = {}
        for leaf, node in enumerate(inputs):
            shape = getattr(node.meta.get("val"), "shape", ())
            for axis, size in enumerate(shape):
                if not isinstance(size, torch.SymInt):
                    continue
                symbol, where = size.node.expr, f"module, input {node.name!r}, axis {axis}"
                bounds = program.range_constraints.get(symbol)
                if bounds is None:
                    raise UnsupportedError(f"its size is {symbol}, which follows from another one", where)
                if symbol not in numbers:
                    numbers[symbol] = len(dimensions)
                    dimensions.append(Dimension(node.name, axis, int(bounds.lower), _largest(bounds, where)))
                axes[leaf, axis] = numbers[symbol]

        def at(sizes: Sizes) -> Exported:
            leaves, spec = pytree.tree_flatten(program.example_inputs)
            for (leaf, axis), number in axes.items():
                leaves[leaf] = resized(leaves[leaf], axis, sizes[number])
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return export_call(program.module(), args, kwargs, "ExportedProgram")

        return FreeModule(tuple(dimensions), at) if dimensions else None


def _largest(bounds: Any, where: str) -> int:
    most = largest(bounds)
    if most is None:
        raise UnsupportedError(
            "its dynamic size has no largest value",
            where,
            hint="Export it with torch.export.Dim(NAME, max=...), or without dynamic shapes",
        )
    return most


def largest(bounds: Any) -> int | None:
    """Return the upper bound of a symbol's range; None if it has none."""
    try:
        return int(bounds.upper)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None


def resized(tensor: Any, axis: int, size: int) -> Any:
    """Return a tensor resized along an axis; its own elements are repeated, because integers may be indices."""
    places = torch.arange(size) % max(1, tensor.shape[axis])
    return torch.index_select(tensor, axis, places)
