"""Builds the ONNX models of benchmarks and tests from a name and options.

`MODELS` is the only list of these models. They are built when they are needed and never committed:
the same name, options and seed give the same bytes.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx

from benchmarks.models.candy import build_candy
from benchmarks.models.conv_bn_relu import build_conv_bn_relu
from benchmarks.models.decoder import build_decoder
from benchmarks.models.efficientvit import build_efficientvit
from benchmarks.models.mlp import build_mlp
from benchmarks.models.mobilenetv3 import build_mobilenetv3
from benchmarks.models.segformer import build_segformer
from benchmarks.models.transformer_block import build_transformer_block
from benchmarks.models.yolov4 import build_yolov4
from benchmarks.models.yolox import build_yolox
from korch.errors import OptionError


@dataclass(frozen=True)
class Model:
    """A model that can be built."""

    name: str  # the key in `MODELS`
    summary: str  # one line for listings
    builder: Callable[..., onnx.ModelProto]  # returns the model; all arguments have defaults
    # arguments that this model sets differently from the builder's defaults
    preset: Mapping[str, object] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, object]:
        """The default of each option, by the option's name."""
        parameters = inspect.signature(self.builder).parameters.values()
        return {p.name: p.default for p in parameters} | dict(self.preset)

    def build(self, **options: object) -> onnx.ModelProto:
        """Build the model; raises `OptionError` on an unknown option."""
        known = self.options
        for name in options:
            if name not in known:
                raise OptionError(f"there is no option {name!r}", self.name, ", ".join(known))
        return self.builder(**(known | options))


_TINY_CANDY = {"size": 24, "channels": (4, 6, 8), "blocks": 1}
_TINY_TRANSFORMER = {"sequence": 6, "width": 16, "heads": 2}
_TINY_EFFICIENTVIT = {
    "size": 32,
    "widths": (4, 4, 8, 8, 16),
    "depths": (1, 1, 1, 1, 1),
    "each": 4,
    "head": 8,
    "classes": 5,
}
_TINY_SEGFORMER = {"size": 32, "widths": (8, 8, 16, 16), "heads": (1, 2, 2, 4), "depth": 1, "joined": 8, "classes": 5}
_TINY_YOLO = {"size": 32, "width": 4, "classes": 3}

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("candy", "fast neural style transfer, 3x224x224", build_candy),
        Model("efficientvit", "segmentation with linear attention, 3x512x512", build_efficientvit),
        Model("yolox", "small detector YOLOX-Nano, 3x416x416", build_yolox),
        Model("yolov4", "detector of 64 million parameters, 3x416x416", build_yolov4),
        Model("segformer", "segmentation by a transformer, 3x512x512", build_segformer),
        Model("mobilenetv3", "classifier MobileNet-v3-Small, 3x224x224", build_mobilenetv3),
        Model("transformer_block", "pre-norm causal transformer block", build_transformer_block),
        Model("decoder", "language model with a cache of keys and values", build_decoder),
        Model("tiny_candy", "candy of 24x24 with few channels", build_candy, _TINY_CANDY),
        Model("tiny_transformer", "block of 6 tokens", build_transformer_block, _TINY_TRANSFORMER),
        Model("tiny_efficientvit", "efficientvit of 32x32 with few channels", build_efficientvit, _TINY_EFFICIENTVIT),
        Model("tiny_yolox", "yolox of 32x32 with few channels", build_yolox, _TINY_YOLO),
        Model(
            "tiny_yolov4",
            "yolov4 of 32x32 with few channels and blocks",
            build_yolov4,
            _TINY_YOLO | {"depths": (1, 1, 1, 1, 1)},
        ),
        Model("tiny_segformer", "segformer of 32x32 with few channels", build_segformer, _TINY_SEGFORMER),
        Model("mlp", "three Gemms with Relu between", build_mlp),
        Model("conv_bn_relu", "small classifier with BatchNormalization", build_conv_bn_relu),
    )
}

PAPER = ("candy", "efficientvit", "yolox", "yolov4", "segformer")
"""The five models of Korch's evaluation (ASPLOS 2024, section 6)."""


def build(name: str, **options: object) -> onnx.ModelProto:
    """Build the model called `name`.

    Args:
        name: a key of `MODELS`.
        options: arguments for the model's builder, for example `seed` or `size`.

    Raises:
        OptionError: the model or an option does not exist, or a value is invalid.
    """
    if name not in MODELS:
        raise OptionError(f"there is no model {name!r}", "benchmarks.models", ", ".join(MODELS))
    return MODELS[name].build(**options)
