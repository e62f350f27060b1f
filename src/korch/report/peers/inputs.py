"""ONNX model -> random inputs, the same for each engine and each run.

Floats come from a standard normal distribution, booleans are even odds, and integers are 0 or 1:
small enough to be valid token numbers or indices in any model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from korch.errors import ModelError, OptionError
from korch.report.peers.peer import Arrays


def random_inputs(
    model_path: Path, seed: int = 0, shapes: Mapping[str, Sequence[int]] | None = None
) -> Arrays:
    """Make an array for each input of the model, in the model's order.

    Args:
        model_path: an ONNX file.
        seed: of the numbers.
        shapes: of inputs with unknown dimensions (or to override known ones).

    Raises:
        ModelError: the file can't be read as ONNX.
        OptionError: a dimension is unknown and `shapes` doesn't give it.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load(str(model_path), load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelError(f"can't be read as ONNX ({error})", where=str(model_path)) from error
    initializers = {tensor.name for tensor in model.graph.initializer}
    found: dict[str, tuple[Sequence[int], np.dtype[Any]]] = {}
    for declared in model.graph.input:
        name, tensor_type = declared.name, declared.type.tensor_type
        if name in initializers:
            continue
        declared_shape = [
            d.dim_value if d.HasField("dim_value") else -1 for d in tensor_type.shape.dim
        ]
        shape = list((shapes or {}).get(name, declared_shape))
        if min(shape, default=0) < 0:
            raise OptionError(
                f"the input {name!r} has an unknown dimension",
                where=str(model_path),
                hint=f"Give its shape, as in --shape {name}=1x3x224x224",
            )
        found[name] = (shape, onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
    return random_arrays(found, seed)


def random_arrays(
    tensors: Mapping[str, tuple[Sequence[int], np.dtype[Any]]], seed: int = 0
) -> Arrays:
    """Make an array for each named shape and element type, in their order."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, (shape, dtype) in tensors.items():
        if np.dtype(dtype).kind in "iub":
            arrays[name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            arrays[name] = rng.standard_normal(shape).astype(dtype)
    return arrays
