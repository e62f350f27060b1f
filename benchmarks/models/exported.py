"""Models of transformers, exported by PyTorch's two ONNX exporters.

`python -m benchmarks.suite --models NAME` takes these names in addition to the others:

    mobilenetv2          written by the tracing exporter (dynamo=False, opset 17), simplified by onnxslim
    mobilenetv2:script   written by the tracing exporter, unchanged; `:script-slim` is the same as no suffix
    mobilenetv2:dynamo   written by the exporter based on torch.export; `:dynamo-slim` adds onnxslim

The modules of `transformers.py` have the same suffixes (`bert:script`, `gpt2:dynamo`, ...); without a
suffix `korch.optimize` exports them itself. Weights are random, from a seed; nothing is downloaded.
"""

import io
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import onnx

from benchmarks.models.sized import SIZED
from benchmarks.models.transformers import TRANSFORMERS, Inputs, ready
from korch.errors import OptionError

FORMS = ("script", "script-slim", "dynamo", "dynamo-slim")
"""Each form says which exporter writes the model, and whether onnxslim simplifies it."""

OPSETS = {"script": 17, "dynamo": 18}


SEGMENTS, CLASSIFIES = "ForSemanticSegmentation", "ForImageClassification"

VISION: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "segformer_b0": ("Segformer", SEGMENTS, {"num_labels": 150}),
    "mobilenetv2": ("MobileNetV2", CLASSIFIES, {"tf_padding": False}),  # with the padding of torchvision
    "resnet18": (
        "ResNet",
        CLASSIFIES,
        {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]},
    ),
    "resnet50": ("ResNet", CLASSIFIES, {}),
    "convnext": ("ConvNext", CLASSIFIES, {}),
    "vit_small": ("ViT", CLASSIFIES, {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}),
}
"""Networks of transformers that read an image: the names of their classes, and the options that are not the default."""


def build_vision(name: str, *, size: int = 0, classes: int = 1000, seed: int = 0) -> tuple[Any, Inputs]:
    """Return a network of `VISION`, and a square image; if `size` is 0, of the size for which the network is known."""
    import torch
    import transformers

    torch.manual_seed(seed)
    family, task, options = VISION[name]
    config = getattr(transformers, f"{family}Config")(**{"num_labels": classes, **options})
    size = size or (512 if task == SEGMENTS else 224)
    return ready(getattr(transformers, family + task)(config)), {"pixel_values": torch.randn(1, 3, size, size)}


EXPORTED: Mapping[str, Callable[..., tuple[Any, Inputs]]] = {
    **{name: partial(build_vision, name) for name in VISION},
    **SIZED,
}
"""The models that are not in `TRANSFORMERS`; each builder returns a module and its inputs by keyword."""


def is_exported(name: str) -> bool:
    """Return whether `export_model` has to build this name; the packages need not be installed."""
    return ":" in name or name in EXPORTED or name in TRANSFORMERS


def export_model(
    name: str, free: Mapping[str, Mapping[int, str]] = MappingProxyType({}), **options: int
) -> onnx.ModelProto:
    """Return a model as an exporter writes it.

    Args:
        name: a key of `EXPORTED` or `TRANSFORMERS`, optionally with ":" and one of `FORMS`.
        free: by input and axis, the name of each dimension whose size is dynamic.
        options: arguments for the model's builder, for example `seed` or `size`.

    Raises:
        OptionError: the model or form does not exist, or a package is missing.
    """
    model, _, form = name.partition(":")
    form = form or "script-slim"
    if form not in FORMS:
        raise OptionError(f"there is no exported form {form!r}", f"model {model}", ", ".join(FORMS))
    packages = ("torch", "transformers", *(["onnxslim"] * form.endswith("-slim")))
    if missing := [package for package in packages if find_spec(package) is None]:
        raise OptionError(
            f"the package {missing[0]} is not installed",
            f"model {name}",
            hint="Install what the benchmarks need: pip install -e '.[torch,bench]'",
        )
    if model in EXPORTED:
        module, inputs = EXPORTED[model](**options)
    elif model in TRANSFORMERS:
        module, inputs = TRANSFORMERS[model].build(**options)
    else:
        known = ", ".join((*EXPORTED, *TRANSFORMERS))
        raise OptionError(f"there is no model {model!r} to export", "benchmarks.models", known)
    exporter = form.removesuffix("-slim")
    found = _export(module, inputs, free, is_dynamo=exporter == "dynamo", opset=OPSETS[exporter])
    if form.endswith("-slim"):
        import onnxslim

        with redirect_stdout(io.StringIO()):
            found = onnxslim.slim(found)
    return found


def _export(
    module: Any, inputs: Inputs, free: Mapping[str, Mapping[int, str]], *, is_dynamo: bool, opset: int
) -> onnx.ModelProto:
    """Return the ONNX model that computes a module's first output from its inputs."""
    import torch

    names = list(inputs)

    class First(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> Any:
            found = self.module(**dict(zip(names, tensors, strict=True)))
            return found if isinstance(found, torch.Tensor) else found[0]

    stream = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            First().eval(),
            tuple(inputs.values()),
            None if is_dynamo else stream,
            input_names=names,
            dynamic_axes={name: dict(axes) for name, axes in free.items()} if free and not is_dynamo else None,
            dynamic_shapes={"tensors": tuple(dict(free.get(n, {})) for n in names)} if free and is_dynamo else None,
            opset_version=opset,
            dynamo=is_dynamo,
        )
        if is_dynamo:
            return program.model_proto
    return onnx.load_from_string(stream.getvalue())
