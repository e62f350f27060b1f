"""Compares engines on models with static QDQ quantization, with weights of 4 or 8 bits, or in 16-bit floats.

    python -m benchmarks.quantized [--models mobilenetv2-96,resnet18] [--against onnxruntime,openvino]
                                   [--budget 60] [--rounds 25] [--artifacts FOLDER] [--output FILE.json]

All engines get the same file, and run interleaved. Weights are random, from a seed. ONNX Runtime makes the static QDQ
models: weights are int8 with a scale for each channel, activations are uint8, calibrated on random inputs. Llama blocks
have int4 weights with a scale for 32 terms (MatMulNBits) or int8 weights with a scale for each column, and read 1 or 32
tokens. Artifacts in the folder are used; models without an artifact are searched first, with an empty cache. Each row
is written when it is complete, and rows in the file are not measured again. A quotient is a median over the rounds.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.models import build
from benchmarks.models.exported import export_model
from benchmarks.models.narrow import in_bfloat16, in_float16, with_int4_weights, with_int8_weights
from benchmarks.rows import artifact_of, artifacts_of, known_rows, options_of, write_rows
from benchmarks.suite import KEPT, quotients
from korch.cli.bench import bench
from korch.loading import load
from korch.options import Options
from korch.records import plain

MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "mobilenetv2-96": partial(export_model, "mobilenetv2:script", size=96),
    "mobilenetv2": partial(export_model, "mobilenetv2:script"),
    "resnet18": partial(export_model, "resnet18:script"),
    "resnet50": partial(export_model, "resnet50:script"),
    "convnext": partial(export_model, "convnext:script"),
    "vit_small": partial(export_model, "vit_small:script"),
    "mobilenetv3": partial(build, "mobilenetv3"),
    "tiny_yolox": partial(build, "tiny_yolox"),
    "bert-layer": partial(export_model, "bert:script", layers=1, vocabulary=1000),
}

_LAYERS = {"bert": {"layers": 4, "vocabulary": 1000}, "vit": {"layers": 4}}
_TYPES = {"f16": in_float16, "bf16": in_bfloat16}
_WEIGHTS = {"int4": with_int4_weights, "int8": with_int8_weights}


def _narrow(narrow: Callable[[onnx.ModelProto], onnx.ModelProto], name: str, **options: int) -> onnx.ModelProto:
    return narrow(export_model(name, **options))


NARROW: Mapping[str, Callable[[], onnx.ModelProto]] = {
    **{
        f"llama-{bits}-{tokens}": partial(_narrow, narrow, "llama:dynamo", sequence=tokens)
        for bits, narrow in _WEIGHTS.items()
        for tokens in (1, 32)
    },
    **{
        f"{name}-{dtype}": partial(_narrow, narrow, f"{name}:script", **options)
        for name, options in _LAYERS.items()
        for dtype, narrow in _TYPES.items()
    },
}
"""Models that need no calibration: with weights of 4 or 8 bits, and in 16-bit floats."""

CALIBRATION = 3
"""The number of random inputs that calibrate the ranges of activations."""


def main() -> int:
    """Compare; return 1 if Korch is slower than ONNX Runtime on any model."""
    parser = options_of(__doc__, (*MODELS, *NARROW), rounds=25)
    parser.add_argument("--against", default="onnxruntime,openvino")
    args = parser.parse_args()
    rows = known_rows(args.output)
    for name in args.models.split(","):
        if name not in rows:
            rows[name] = measure(name, args)
        write_rows(args.output, rows)
    found = (quotients(row).get("onnxruntime", [1.0]) for row in rows.values())
    return int(any(np.median(quotient) < 1 for quotient in found))


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compare a model with other engines, and return its row; search its artifact first if there is none."""
    with artifacts_of(args) as kept:
        model, artifact = kept / f"{name}.onnx", kept / f"{name}.korch"
        if not model.exists() and name in NARROW:
            onnx.save(NARROW[name](), model)
        elif not model.exists():
            quantize(MODELS[name](), model)
        executable: Any = load(artifact_of(model, artifact, budget=args.budget))
        row = {
            "report": {key: plain(getattr(executable.report, key)) for key in KEPT},
            "budget_s": executable.report.budget_s,
            "products": dict(Counter(products_of(executable))),
        }
        del executable
        comparison = bench(artifact, args.against.split(","), model, args.rounds, Options(), {})
    print(f"{name}\n{comparison.to_text()}\n", flush=True)
    return row | {"comparison": comparison.to_json()}


def products_of(executable: Any) -> Iterator[str]:
    """Yield the element type of the first operand of each product and convolution in a plan."""
    for step in executable.plan.steps:
        types = dict(re.findall(r'(%\d+)(?: "[^"]*")?: (\w+)\[', step.primitives))
        for first in re.findall(r" = (?:conv|conv_transpose|matmul)\((%\d+)", step.primitives):
            yield types[first]


def quantize(model: onnx.ModelProto, path: Path) -> None:
    """Quantize a model statically, with quantize and dequantize operators (QDQ), and write it to a file."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    feeds = [random_inputs(model, seed) for seed in range(CALIBRATION)]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return next(self.left, None)

    with tempfile.TemporaryDirectory() as folder:
        given, ready = Path(folder) / "given.onnx", Path(folder) / "ready.onnx"
        onnx.save(model, given)
        quant_pre_process(str(given), str(ready), skip_symbolic_shape=True)
        quantize_static(
            str(ready),
            str(path),
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


def random_inputs(model: onnx.ModelProto, seed: int) -> dict[str, NDArray[Any]]:
    """Return seeded inputs: floats from a standard normal distribution, integers 0 and 1."""
    rng = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        array = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        found[value.name] = array.astype(dtype)
    return found


if __name__ == "__main__":
    sys.exit(main())
