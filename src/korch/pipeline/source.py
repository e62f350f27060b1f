"""Sources of models with free dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from korch.fission import fission
from korch.frontend.onnx import ModelSource, load_model, read_model
from korch.frontend.operator import OperatorGraph
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.binding import Bound, binding_of, dimensions_of
from korch.ranges.form import Dimension, Sizes

MOST_KEPT = 16
"""For how many choices of sizes a model's primitives are kept; they share its weights."""


@dataclass(frozen=True)
class Source:
    """A model with free dimensions.

    Attributes:
        dimensions: the free dimensions.
        primitives: returns the model's primitives for one size of each dimension.
        bound: returns the model and the binding for such sizes, as arguments of `optimize_model`.
    """

    dimensions: tuple[Dimension, ...]
    primitives: Callable[[Sizes], PrimitiveGraph]
    bound: Callable[[Sizes], tuple[ModelSource | OperatorGraph, Mapping[str, tuple[int, ...]]]]

    @staticmethod
    def of(
        model: ModelSource, dimensions: tuple[Dimension, ...], binding: Callable[[Sizes], Mapping[str, tuple[int, ...]]]
    ) -> Source:
        """Return the source of an ONNX model.

        Args:
            model: as for `load_model`.
            dimensions: the free dimensions.
            binding: returns the shapes of inputs by name, for sizes of the dimensions.

        Raises:
            ModelError: as `load_model`.
        """
        loaded = read_model(model)
        primitives = lru_cache(MOST_KEPT)(lambda sizes: fission(load_model(loaded, binding(sizes))))
        return Source(dimensions, primitives, lambda sizes: (model, binding(sizes)))


def onnx_source(model: ModelSource, shapes: Mapping[str, Sequence[Bound]]) -> Source:
    """Return the source of an ONNX model whose binding of dimensions has ranges.

    Args:
        model: a path, the bytes of an ONNX file or an onnx.ModelProto.
        shapes: the binding.

    Raises:
        ModelError: as `load_model`.
    """
    return Source.of(model, dimensions_of(shapes), partial(binding_of, shapes))
