"""ONNX model or executable -> random inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from korch.errors import ModelError, OptionError
from korch.inputs import random_arrays
from korch.report.peers.peer import Arrays

if TYPE_CHECKING:
    from korch.runtime.runnable import TensorInfo


def random_inputs(model_path: Path, seed: int = 0, shapes: Mapping[str, Sequence[int]] | None = None) -> Arrays:
    """Make an array for each input of the model, in the model's order.

    Args:
        model_path: an ONNX file.
        seed: the random seed.
        shapes: the shapes of inputs with unknown dimensions; they override known shapes too.

    Raises:
        ModelError: the file can't be read as ONNX.
        OptionError: a dimension is unknown and `shapes` doesn't give it.
    """
    import onnx

    graph = read_graph(model_path)
    initializers = {tensor.name for tensor in graph.initializer}
    found: dict[str, tuple[Sequence[int], np.dtype[Any]]] = {}
    for declared in graph.input:
        name, tensor_type = declared.name, declared.type.tensor_type
        if name in initializers:
            continue
        declared_shape = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor_type.shape.dim]
        shape = list((shapes or {}).get(name, declared_shape))
        if min(shape, default=0) < 0:
            raise OptionError(
                f"the input {name!r} has an unknown dimension",
                where=str(model_path),
                hint=f"Give its shape, as in --shape {name}=1x3x224x224",
            )
        found[name] = (shape, onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
    return random_arrays(found, seed)


def read_graph(model_path: Path) -> Any:
    """Return the graph of an ONNX file, without external data.

    Raises:
        ModelError: the file can't be read as ONNX.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        return onnx.load(str(model_path), load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise ModelError(f"can't be read as ONNX ({error})", where=str(model_path)) from error


def free_dimensions(graph: Any, inputs: Arrays) -> dict[str, int]:
    """Return the size in `inputs` of each symbolic dimension of a graph's inputs, by its name."""
    sizes: dict[str, int] = {}
    for declared in graph.input:
        if declared.name not in inputs:
            continue
        dimensions = declared.type.tensor_type.shape.dim
        for dimension, size in zip(dimensions, inputs[declared.name].shape, strict=False):
            if dimension.dim_param:
                sizes[dimension.dim_param] = size
    return sizes


def random_feeds(tensors: Sequence[TensorInfo], seed: int = 0) -> Arrays:
    """Return a random array for each described input of an executable, by name.

    Raises:
        OptionError: the seed is negative.
    """
    return random_arrays({tensor.name: (tuple(tensor.shape), tensor.dtype) for tensor in tensors}, seed)
