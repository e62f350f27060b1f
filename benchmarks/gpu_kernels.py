"""Compares single generated kernels on a CUDA device with cuBLAS, cuDNN and PyTorch's attention.

    python -m benchmarks.gpu_kernels [--cases square,conv] [--seconds 120] [--output gpu-kernels.json]

Each case is a small model. All kernels that compute a whole case are compiled and measured as in a search: in a
replayed CUDA graph, with weights that are read from memory. The table has the time of the fastest generated kernel,
the time of the fastest call of PyTorch, their quotient, and the generated kernel's arithmetic rate, memory rate and
variant.
Softmax and normalizations compute in float32 at every precision, so they are compared in float32 only.
The memory rate counts inputs and outputs once. The output file has the times of all kernels.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from korch.backend import open_meter
from korch.candidate.candidate import Candidate
from korch.cuda.measure.job_file import JobFile
from korch.measure.record import Measured
from korch.options import Options
from korch.pipeline import Run, front, untold
from korch.pipeline.prepare import Prepared, add_kernels
from korch.search.instance import Answers
from korch.segments.block_task import prepare
from korch.system.deadline import Deadline

Build = Callable[[], onnx.ModelProto]

ROUNDS = ("cast", "round_tf32")
"""Primitives that neighbouring kernels compute in a model."""


@dataclass(frozen=True)
class Case:
    """A small model that one kernel can compute."""

    build: Build  # makes the model
    flop: float  # operations of a run; 0 if the arithmetic rate does not matter
    precisions: tuple[str, ...] = ("float16", "tf32", "float32")  # the precisions in which it is measured


def _model(inputs: str, nodes: str, **weights: Sequence[int]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    text = f'<ir_version: 9, opset_import: ["": 20]> case ({inputs}) => (float[] y) {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    arrays = {name: (rng.standard_normal(shape) * 0.1).astype(np.float32) for name, shape in weights.items()}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def _product(m: int, n: int, k: int) -> onnx.ModelProto:
    return _model(f"float[{m},{k}] x", "y = MatMul(x, w)", w=(k, n))


def _linear(m: int, n: int, k: int) -> onnx.ModelProto:
    """Return a product with a bias and an activation, as in a layer of a transformer."""
    nodes = 'a = MatMul(x, w) c = Add(a, b) y = Gelu<approximate = "tanh">(c)'
    return _model(f"float[{m},{k}] x", nodes, w=(k, n), b=(n,))


def _conv(batch: int, channels: int, size: int, outputs: int, window: int, groups: int) -> onnx.ModelProto:
    node = f"y = Conv<pads = {[window // 2] * 4}, group = {groups}>(x, w)"
    weights = (outputs, channels // groups, window, window)
    return _model(f"float[{batch},{channels},{size},{size}] x", node, w=weights)


def _attention(heads: int, rows: int, width: int) -> onnx.ModelProto:
    q, k = f"float[{heads},{rows},{width}]", f"float[{heads},{width},{rows}]"
    nodes = "s = MatMul(q, k) t = Mul(s, f) p = Softmax<axis = -1>(t) y = MatMul(p, v)"
    return _model(f"{q} q, {k} k, {q} v", nodes, f=())


def _rows(op: str, rows: int, width: int) -> onnx.ModelProto:
    weights: dict[str, Sequence[int]] = {"g": (width,), "b": (width,)} if op == "LayerNormalization" else {}
    return _model(f"float[{rows},{width}] x", f"y = {op}<axis = -1>({', '.join(('x', *weights))})", **weights)


CASES = {
    **{
        f"product {m}x{n}x{k}": Case(partial(_product, m, n, k), 2.0 * m * n * k)
        for m, n, k in ((4096, 4096, 4096), (128, 768, 768), (2048, 3072, 768), (1, 4096, 4096), (16, 4096, 4096))
    },
    "linear 2048x3072x768": Case(partial(_linear, 2048, 3072, 768), 2.0 * 2048 * 3072 * 768),
    **{
        f"conv {b}x{c}x{s} -> {o}, {w}x{w}": Case(partial(_conv, b, c, s, o, w, 1), 2.0 * b * c * s * s * o * w * w)
        for b, c, s, o, w in ((1, 128, 56, 128, 3), (16, 256, 28, 256, 3), (1, 3, 224, 32, 9))
    },
    "depthwise 1x256x56": Case(partial(_conv, 1, 256, 56, 256, 3, 256), 2.0 * 256 * 56 * 56 * 9),
    "attention 12x512x64": Case(partial(_attention, 12, 512, 64), 4.0 * 12 * 512 * 512 * 64),
    "attention 192x1024x64": Case(partial(_attention, 192, 1024, 64), 4.0 * 192 * 1024 * 1024 * 64),
    "softmax 8192x4096": Case(partial(_rows, "Softmax", 8192, 4096), 0.0, ("float32",)),
    "layer norm 8192x1024": Case(partial(_rows, "LayerNormalization", 8192, 1024), 0.0, ("float32",)),
}


def main() -> int:
    """Measure the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="parts of their names; all if empty")
    parser.add_argument("--precisions", default="float16,tf32,float32")
    parser.add_argument("--seconds", type=float, default=120.0, help="no case begins after this time")
    parser.add_argument("--target", default="cuda", help="cuda:sm_90, or cuda:NAME for the records of a device")
    parser.add_argument("--add-to", type=Path, help="add the kernels to this file, for `korch measure`")
    parser.add_argument("--cache", type=Path, default=Path("build/gpu/cache"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    end_s = time.monotonic() + args.seconds
    found: dict[str, Any] = {"device": "none", "clock": "replayed graphs, on the device, behind a sleep", "rows": []}
    for precision in args.precisions.split(","):
        options = replace(Options(), target=args.target, cache_folder=args.cache, precision=precision)
        with open_meter(options) as meter:
            found["device"], found["versions"] = meter.target.name, list(meter.target.versions)
            for name, case in CASES.items():
                is_wanted = not args.cases or any(part in name for part in args.cases.split(","))
                if not is_wanted or precision not in case.precisions or time.monotonic() > end_s:
                    continue
                found["rows"].append(measure(name, case, precision, meter, options, args.add_to))
                print(line(found["rows"][-1]), flush=True)
                if args.output is not None:
                    args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(
    name: str, case: Case, precision: str, meter: Any, options: Options, add_to: Path | None = None
) -> dict[str, Any]:
    """Return a case's row: the times of all kernels that compute the whole case, casts at its ends aside.

    `add_to`: the file of jobs to which the kernels are added.
    """
    model = case.build()
    partition, _ = front(Run(options, {}, untold, model))
    kernels: list[Candidate] = []
    for block in partition.blocks:
        task = prepare(partition, block, Answers(meter.providers, meter.target), options)
        graph = block.graph
        given, wanted = {value for _, value in graph.inputs} | set(graph.constants), {v for _, v in graph.outputs}
        for primitive in graph.primitives:  # in a model, neighbouring kernels do the casts at both ends
            given |= {primitive.output} if primitive.op in ROUNDS and set(primitive.inputs) <= given else set()
            wanted |= set(primitive.inputs) if primitive.op in ROUNDS and primitive.output in wanted else set()
        kernels = [c for c in task.candidates if c.group.outputs[0] in wanted and given >= set(c.group.inputs)]
        kernels = [c for c in kernels if any(graph.primitives[p].op not in ROUNDS for p in c.group.primitives)]
    if add_to is not None:
        found = Prepared(len(kernels), len(kernels))
        add_kernels(kernels, meter, JobFile(add_to), found, len(kernels), Deadline())
    if not meter.target.is_nominal:
        meter.measure(kernels)
    times: list[dict[str, Any]] = []
    for candidate in kernels:
        record = meter.known(candidate)
        is_timed = isinstance(record, Measured)
        times.append(
            {
                "provider": candidate.provider,
                "variant": str(candidate.offer.variant),
                "us": record.time_ns / 1e3 if is_timed else None,
                "bytes": sum(t.size_bytes for t in (*candidate.group.input_types, *candidate.group.output_types)),
                "bound_us": meter.bound_ns(candidate) / 1e3,
                **({} if is_timed else {"failure": str(record)[:300]}),
            }
        )
    row = {"case": name, "precision": precision, "flop": case.flop, "kernels": times}
    peer = torch_us(name, precision) if options.target == "cuda" else None
    return {**row, "torch_us": peer}


def torch_us(name: str, precision: str) -> float | None:
    """Return µs of PyTorch's attention, softmax or layer norm; None for other cases, which a provider calls anyway."""
    import torch
    from torch.nn import functional

    kind = torch.float16 if precision == "float16" else torch.float32
    what, _, sizes = name.rpartition(" ")
    shape = [int(size) for size in sizes.split("x")] if what in ("attention", "softmax", "layer norm") else []
    if not shape:
        return None
    tensors = [torch.randn(shape, device="cuda", dtype=kind) for _ in range(3)]
    runs: dict[str, Callable[[], Any]] = {
        "attention": lambda: functional.scaled_dot_product_attention(*(t[None] for t in tensors)),
        "softmax": lambda: functional.softmax(tensors[0], -1),
        "layer norm": lambda: functional.layer_norm(tensors[0], shape[1:], tensors[1][0], tensors[2][0]),
    }
    from korch.cuda.flags import library_flags
    from korch.cuda.measure.device import _replayed_ns

    with library_flags(torch, precision == "tf32"), torch.no_grad():
        return float(_replayed_ns(torch, runs[what])) / 1e3


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    own = [k for k in row["kernels"] if k["provider"].startswith("triton") and k["us"]]
    calls = [k["us"] for k in row["kernels"] if not k["provider"].startswith("triton") and k["us"]]
    calls += [row["torch_us"]] if row["torch_us"] else []
    failed = sum(k["us"] is None for k in row["kernels"])
    text = f"{row['case']:26}{row['precision']:8}{len(row['kernels']):3} kernels, {failed} failed"
    if not own:
        return text + f" torch {min(calls, default=math.nan):9.1f} us"
    best = min(own, key=lambda kernel: kernel["us"])
    other = min(calls, default=math.nan)
    rates = f"{row['flop'] / best['us'] / 1e6:6.1f} TFLOP/s {best['bytes'] / best['us'] / 1e3:6.0f} GB/s"
    return f"{text} {best['us']:9.1f} us, torch {other:9.1f} us: {other / best['us']:5.2f} {rates} {best['variant']}"


if __name__ == "__main__":
    raise SystemExit(main())
