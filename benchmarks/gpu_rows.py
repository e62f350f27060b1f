"""The rows of the table of `benchmarks.device`: models and blocks of models, by precision and batch."""

import copy
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from benchmarks.models import PAPER, build
from benchmarks.models.paper_blocks import (
    linear_attention,
    normalized_and_padded,
    resized_and_joined,
    softmax_attention,
)
from benchmarks.models.transformers import NAMES, TRANSFORMERS
from benchmarks.paper import BLOCKS, of_batch
from benchmarks.peers.torch_operators.module import load_module
from korch.frontend.onnx import ModelSource
from korch.inputs import random_inputs

PRECISIONS = ("tf32", "float16", "float32")

SIZES = {("efficientvit", 1): {"size": 2048}}
"""Sizes in the paper's evaluation on a GPU (Korch, section 6) that differ from the default sizes."""

TINY_BLOCKS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "norm, ReLU, pad": partial(normalized_and_padded, 6),
    "resize x4, concat": partial(resized_and_joined, 1, 1),
    "the same, batch 16": partial(resized_and_joined, 2, 1),
    "linear attention, 512²": partial(linear_attention, 2),
    "linear attention, 2048²": partial(linear_attention, 4),
    "softmax attention": partial(softmax_attention, 32, 16),
}
"""The blocks in small sizes, for dry runs."""

TINY_BATCH = 2


@dataclass(frozen=True)
class Row:
    """A model in one precision, for a number of images or texts."""

    model: str
    precision: str
    batch: int

    @property
    def key(self) -> str:
        """Its name, which is also the name of a file."""
        return f"{re.sub('[^a-z0-9]+', '-', self.model.lower()).strip('-')}-{self.precision}-{self.batch}"


def all_rows() -> list[Row]:
    """Return all rows, the most important ones first."""
    models = (*PAPER, *NAMES)
    found = [Row(name, precision, batch) for batch in (1, 16) for precision in PRECISIONS for name in models]
    return [*found, *(Row(name, precision, 1) for precision in PRECISIONS for name in BLOCKS)]


@lru_cache(maxsize=1)
def source_of(row: Row, is_tiny: bool = False) -> tuple[ModelSource, Callable[[], tuple[Any, list[Any]]]]:
    """Return a row's model for Korch, and a function that makes its module of PyTorch with inputs, both on the CPU.

    In float16 the model itself has this type, for all engines: also what it adds up from layer to layer.

    `is_tiny`: a model of the same kind in a small size.

    Raises:
        ImportError: the package transformers is not installed.
    """
    is_half = row.precision == "float16"
    if row.model not in NAMES:
        model = _onnx_model(row, is_tiny)
        model = in_half(model) if is_half else model
        return model, partial(_module_of, model)
    if not TRANSFORMERS:
        raise ImportError("the package transformers is not installed")
    import torch

    from korch.frontend.torch import export_module

    entry = TRANSFORMERS[row.model]
    original, example = entry.build_tiny() if is_tiny else entry.build()
    batch = min(row.batch, TINY_BATCH) if is_tiny else row.batch
    example = {name: tensor.expand(batch, *tensor.shape[1:]).contiguous() for name, tensor in example.items()}

    class Flat(torch.nn.Module):  # type: ignore[misc]
        """Takes tensors in order and returns the first result."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = original

        def forward(self, *tensors: Any) -> Any:
            """Run the model."""
            return self.inner(**dict(zip(example, tensors, strict=True)))[0]

    module, inputs = Flat().eval(), list(example.values())
    if is_half:
        module, inputs = module.half(), [t.half() if t.is_floating_point() else t for t in inputs]
    # The exported model shares the weights of the module, which may be moved.
    return export_module(module, inputs).model, lambda: (copy.deepcopy(module), inputs)


def in_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model of float32 with all values in float16, but for factors of sizes, which must be float32."""
    factors = {name for node in model.graph.node if node.op_type == "Resize" for name in node.input[1:]}
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in factors:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del model.graph.value_info[:]
    return model


def _onnx_model(row: Row, is_tiny: bool) -> onnx.ModelProto:
    if row.model in BLOCKS:
        return (TINY_BLOCKS if is_tiny else BLOCKS)[row.model]()
    if is_tiny:
        return of_batch(build(f"tiny_{row.model}"), min(row.batch, TINY_BATCH))
    return of_batch(build(row.model, **SIZES.get((row.model, row.batch), {})), row.batch)


def _module_of(model: onnx.ModelProto) -> tuple[Any, list[Any]]:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        arrays = random_inputs(path)
        module = load_module(path, {name: array.shape for name, array in arrays.items()})
    return module.eval(), [torch.from_numpy(array) for array in arrays.values()]
