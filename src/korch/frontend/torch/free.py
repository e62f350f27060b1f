"""Exports modules with dynamic dimensions as ONNX, once for all of their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from korch.errors import UnsupportedError
from korch.frontend.torch.export import Exported, export_call
from korch.ranges.form import Dimension, Sizes


@dataclass(frozen=True, eq=False)
class FreeModule:
    """A module that takes tensors of several sizes, exported once for all of them."""

    # the free dimensions, each named by the first input that has it and its axis there
    dimensions: tuple[Dimension, ...]
    # the number of the dimension of each free axis, by the number of a tensor and the axis
    axes: Mapping[tuple[int, int], int]
    module: Any  # the module
    args: Sequence[Any]  # the positional arguments of an example call with the largest sizes
    kwargs: Mapping[str, Any]  # its keyword arguments
    name: str  # the module's name, for messages

    @staticmethod
    def at_largest(
        dimensions: tuple[Dimension, ...],
        axes: Mapping[tuple[int, int], int],
        call: tuple[Any, Sequence[Any], Mapping[str, Any], str],
    ) -> FreeModule:
        """Return a module for an example call of any sizes.

        `call`: a module, the arguments of an example call, and its name, as for `export_call`.
        """
        module, args, kwargs, name = call
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for (k, axis), n in axes.items():
            leaves[places[k]] = resized(leaves[places[k]], axis, dimensions[n].high)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return FreeModule(dimensions, axes, module, args, kwargs, name)

    @cached_property
    def exported(self) -> Exported:
        """The module as an ONNX model that leaves the sizes open; it is exported when this is first read.

        Raises:
            UnsupportedError: PyTorch can't export it for all sizes.
            ModelError: it returns no tensor.
        """
        symbols = [torch.export.Dim(f"size{n}", min=d.low, max=d.high) for n, d in enumerate(self.dimensions)]
        free = {key: symbols[n] for key, n in self.axes.items() if self.dimensions[n].low < self.dimensions[n].high}
        with torch.inference_mode(False), torch.no_grad():
            return export_call(self.module, self.args, self.kwargs, self.name, free)

    def at(self, sizes: Sizes) -> Exported:
        """Return the module for one size of each dimension."""
        tensors = list(self.exported.tensors)
        for (k, axis), n in self.axes.items():
            tensors[k] = resized(tensors[k], axis, sizes[n])
        names = [value.name for value in self.exported.model.proto.graph.input]
        return replace(
            self.exported, tensors=tensors, shapes={n: tuple(t.shape) for n, t in zip(names, tensors, strict=True)}
        )

    @staticmethod
    def of(program: Any) -> FreeModule | None:
        """Return the module of a program whose inputs have dynamic dimensions, None if there are none.

        `program`: any model; there are none unless it is an ExportedProgram.

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
        tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
        for k, node in enumerate(tensors):
            shape = node.meta["val"].shape
            for axis, size in enumerate(shape):
                if not isinstance(size, torch.SymInt) or size.node.expr.is_number:  # a number: the module fixes it
                    continue
                symbol, where = size.node.expr, f"module, input {node.name!r}, axis {axis}"
                bounds = program.range_constraints.get(symbol)
                if bounds is None:
                    raise UnsupportedError(f"its size is {symbol}, which follows from another one", where)
                if symbol not in numbers:
                    numbers[symbol] = len(dimensions)
                    dimensions.append(Dimension(node.name, axis, int(bounds.lower), _largest(bounds, where)))
                axes[k, axis] = numbers[symbol]

        if not dimensions:
            return None
        args, kwargs = program.example_inputs
        call = (program.module(), args, kwargs, "ExportedProgram")
        return FreeModule.at_largest(tuple(dimensions), axes, call)


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
