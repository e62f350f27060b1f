"""Sources of models with free dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from korch.errors import UnsupportedError
from korch.fission import fission
from korch.fission.recurrent import RULES as RECURRENT
from korch.frontend.fold import constant_of
from korch.frontend.names import all_nodes, subgraphs
from korch.frontend.onnx import LoadedModel, ModelSource, load_model, read_model
from korch.frontend.operator import OperatorGraph
from korch.frontend.tensors import read_tensor
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.binding import Bound, binding_of, dimensions_of
from korch.ranges.form import Dimension, Sizes
from korch.ranges.masked import Masked, masked

COMPARING = {"Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min"}
"""Operators whose result may change at one size, the constant with which they compare it."""

MOST_KEPT = 16
"""For how many choices of sizes a model's primitives are kept; they share its weights."""


class Primitives(Protocol):
    """A model's primitives by the size of each dimension, with recurrent operators as loops or kept whole."""

    def __call__(self, sizes: Sizes, *, with_loops: bool = True) -> PrimitiveGraph:
        """Return the primitives."""


@dataclass(frozen=True)
class Source:
    """A model with free dimensions."""

    dimensions: tuple[Dimension, ...]  # the free dimensions
    primitives: Callable[[Sizes], PrimitiveGraph]  # returns the model's primitives for one size of each dimension
    # returns the model and the binding for such sizes, as arguments of `optimize_model`
    bound: Callable[[Sizes], tuple[ModelSource | OperatorGraph, Mapping[str, tuple[int, ...]]]]
    compared: frozenset[int] = frozenset()  # the integers that the model compares others with
    # the same primitives, but with recurrent operators kept whole; None if there are none
    unsplit: Callable[[Sizes], PrimitiveGraph] | None = None

    def masked(self, sizes: Sizes) -> Masked:
        """Return the primitives for all sizes up to some; recurrent operators whose loops are refused are kept whole.

        Raises:
            UnsupportedError: as `korch.ranges.masked.masked`.
        """
        try:
            return masked(self.dimensions, sizes, self.primitives, self.compared)
        except UnsupportedError as error:
            if self.unsplit is None:
                raise
            with suppress(UnsupportedError):
                return masked(self.dimensions, sizes, self.unsplit, self.compared)
            raise error

    @staticmethod
    def of(
        model: ModelSource, dimensions: tuple[Dimension, ...], binding: Callable[[Sizes], Mapping[str, tuple[int, ...]]]
    ) -> Source:
        """Return the source of an ONNX model.

        `binding`: returns the shapes of inputs by name, for sizes of the dimensions.

        Raises:
            ModelError: as `load_model`.
        """
        loaded = read_model(model)

        def primitives(sizes: Sizes, *, with_loops: bool = True) -> PrimitiveGraph:
            return fission(load_model(loaded, binding(sizes)), with_loops=with_loops)

        return Source.made(loaded, dimensions, primitives, lambda sizes: (model, binding(sizes)))

    @staticmethod
    def made(
        model: LoadedModel,
        dimensions: tuple[Dimension, ...],
        primitives: Primitives,
        bound: Callable[[Sizes], tuple[ModelSource | OperatorGraph, Mapping[str, tuple[int, ...]]]],
    ) -> Source:
        """Return the source of a model; `bound`: as the field."""
        recurrent = {rule.operator for rule in RECURRENT}
        is_recurrent = any(node.op_type in recurrent for node in all_nodes(model.nodes))
        return Source(
            dimensions,
            lru_cache(MOST_KEPT)(primitives),
            bound,
            compared_numbers(model),
            lru_cache(MOST_KEPT)(partial(primitives, with_loops=False)) if is_recurrent else None,
        )


def onnx_source(model: ModelSource, shapes: Mapping[str, Sequence[Bound]]) -> Source:
    """Return the source of an ONNX model whose binding of dimensions has ranges.

    `model`: a path, the bytes of an ONNX file or an onnx.ModelProto.

    Raises:
        ModelError: as `load_model`.
    """
    return Source.of(model, dimensions_of(shapes), partial(binding_of, shapes))


def compared_numbers(model: LoadedModel) -> frozenset[int]:
    """Return the integers of short constants with which a model, or a body of a loop, compares other integers."""
    nodes = list(all_nodes(model.nodes))
    read = {name for node in nodes if node.op_type in COMPARING for name in node.input}
    found = [array for name, array in model.constants.items() if name in read]
    for node in nodes:  # bodies beside each other may give different constants the same name
        stored = [tensor for graph in subgraphs(node) for tensor in graph.initializer if tensor.name in read]
        found += [read_tensor(t, None, model.name) for t in stored if math.prod(t.dims) <= MOST_KEPT]
        if node.op_type == "Constant" and read.intersection(node.output) and len(node.attribute) == 1:
            made = constant_of(node)
            found += [] if made is None else [made]
    short = (array for array in found if array.dtype.kind in "iu" and array.size <= MOST_KEPT)
    return frozenset(int(number) for array in short for number in np.ravel(array))
