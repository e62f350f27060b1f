"""Models of transformers, exported by PyTorch's two ONNX exporters.

`python -m benchmarks.suite --models NAME` takes these names in addition to the others:

    mobilenetv2          written by the tracing exporter (dynamo=False, opset 17), simplified by onnxslim
    mobilenetv2:script   written by the tracing exporter, unchanged; `:script-slim` is the same as no suffix
    mobilenetv2:dynamo   written by the exporter based on torch.export; `:dynamo-slim` adds onnxslim

The modules of `transformers.py` have the same suffixes (`bert:script`, `gpt2:dynamo`, ...); without a
suffix `korch.optimize` exports them itself. Weights are random, from a seed; nothing is downloaded.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
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


def build_segformer_b0(*, size: int = 512, seed: int = 0) -> tuple[Any, Inputs]:
    """Return Segformer-B0 from transformers with 150 classes, and an image."""
    import torch
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(seed)
    module = SegformerForSemanticSegmentation(SegformerConfig(num_labels=150))
    return ready(module), {"pixel_values": torch.randn(1, 3, size, size)}


def build_mobilenetv2(*, size: int = 224, classes: int = 1000, seed: int = 0) -> tuple[Any, Inputs]:
    """Return MobileNet-v2 from transformers with the padding of torchvision, and an image."""
    import torch
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    torch.manual_seed(seed)
    config = MobileNetV2Config(num_labels=classes, tf_padding=False)
    module = ready(MobileNetV2ForImageClassification(config))
    return module, {"pixel_values": torch.randn(1, 3, size, size)}


def build_resnet50(*, size: int = 224, seed: int = 0) -> tuple[Any, Inputs]:
    """Return ResNet-50 from transformers, and an image."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(seed)
    return ready(ResNetForImageClassification(ResNetConfig(num_labels=1000))), {
        "pixel_values": torch.randn(1, 3, size, size)
    }


def build_resnet18(*, size: int = 224, classes: int = 1000, seed: int = 0) -> tuple[Any, Inputs]:
    """Return ResNet-18 from transformers, and an image."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(seed)
    config = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], num_labels=classes)
    return ready(ResNetForImageClassification(config)), {"pixel_values": torch.randn(1, 3, size, size)}


def build_convnext(*, size: int = 224, seed: int = 0) -> tuple[Any, Inputs]:
    """Return ConvNeXt-T from transformers, and an image."""
    import torch
    from transformers import ConvNextConfig, ConvNextForImageClassification

    torch.manual_seed(seed)
    config = ConvNextConfig(num_labels=1000)
    return ready(ConvNextForImageClassification(config)), {"pixel_values": torch.randn(1, 3, size, size)}


def build_vit_small(*, size: int = 224, seed: int = 0) -> tuple[Any, Inputs]:
    """Return ViT-S/16 from transformers, and an image."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000)
    return ready(ViTForImageClassification(config)), {"pixel_values": torch.randn(1, 3, size, size)}


EXPORTED: Mapping[str, Callable[..., tuple[Any, Inputs]]] = {
    "segformer_b0": build_segformer_b0,
    "mobilenetv2": build_mobilenetv2,
    "resnet18": build_resnet18,
    "resnet50": build_resnet50,
    **SIZED,
    "convnext": build_convnext,
    "vit_small": build_vit_small,
}
"""The models that are not in `TRANSFORMERS`; each builder returns a module and its inputs by keyword."""


def is_exported(name: str) -> bool:
    """Return whether `export_model` has to build this name; the packages need not be installed."""
    return ":" in name or name in EXPORTED


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
