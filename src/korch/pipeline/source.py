"""Sources of models with free dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from korch.fission import fission
from korch.frontend.onnx import ModelSource, load_model, read_model
from korch.frontend.operator import OperatorGraph
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.binding import Bound, binding_of, dimensions_of
from korch.ranges.form import Dimension, Sizes


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
    bound: Callable[[Sizes], tuple[ModelSource | OperatorGraph, dict[str, tuple[int, ...]]]]


def onnx_source(model: ModelSource, shapes: Mapping[str, Sequence[Bound]]) -> Source:
    """Return the source of an ONNX model whose binding of dimensions has ranges.

    Args:
        model: a path, the bytes of an ONNX file or an onnx.ModelProto.
        shapes: the binding.

    Raises:
        ModelError: as `load_model`.
    """
    loaded = read_model(model)
    return Source(
        dimensions_of(shapes),
        lambda sizes: fission(load_model(loaded, binding_of(shapes, sizes))),
        lambda sizes: (model, binding_of(shapes, sizes)),
    )
