"""Sources of models with free dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from korch.fission import fission
from korch.frontend.fold import constant_of
from korch.frontend.onnx import LoadedModel, ModelSource, load_model, read_model
from korch.frontend.operator import OperatorGraph
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.binding import Bound, binding_of, dimensions_of
from korch.ranges.form import Dimension, Sizes

COMPARING = {"Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min"}
"""Operators whose result may change at one size, the constant with which they compare it."""

MOST_KEPT = 16
"""For how many choices of sizes a model's primitives are kept; they share its weights."""


@dataclass(frozen=True)
class Source:
    """A model with free dimensions."""

    dimensions: tuple[Dimension, ...]  # the free dimensions
    primitives: Callable[[Sizes], PrimitiveGraph]  # returns the model's primitives for one size of each dimension
    # returns the model and the binding for such sizes, as arguments of `optimize_model`
    bound: Callable[[Sizes], tuple[ModelSource | OperatorGraph, Mapping[str, tuple[int, ...]]]]
    compared: frozenset[int] = frozenset()  # the integers that the model compares others with

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
        primitives = lru_cache(MOST_KEPT)(lambda sizes: fission(load_model(loaded, binding(sizes))))
        return Source(dimensions, primitives, lambda sizes: (model, binding(sizes)), compared_numbers(loaded))


def onnx_source(model: ModelSource, shapes: Mapping[str, Sequence[Bound]]) -> Source:
    """Return the source of an ONNX model whose binding of dimensions has ranges.

    `model`: a path, the bytes of an ONNX file or an onnx.ModelProto.

    Raises:
        ModelError: as `load_model`.
    """
    return Source.of(model, dimensions_of(shapes), partial(binding_of, shapes))


def compared_numbers(model: LoadedModel) -> frozenset[int]:
    """Return the integers of short constants with which a model compares other integers."""
    read = {name for node in model.nodes if node.op_type in COMPARING for name in node.input}
    made = [
        constant_of(node)
        for node in model.nodes
        if node.op_type == "Constant" and read.intersection(node.output) and len(node.attribute) == 1
    ]
    found = [array for array in (*(model.constants.get(name) for name in read), *made) if array is not None]
    short = (array for array in found if array.dtype.kind in "iu" and array.size <= MOST_KEPT)
    return frozenset(int(number) for array in short for number in np.ravel(array))
