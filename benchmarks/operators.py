"""Compares single operators with ONNX Runtime: running sums, chosen elements, spectra and loops.

    python -m benchmarks.operators [--models cumsum,dft] [--budget 10] [--rounds 15]
                                   [--artifacts FOLDER] [--output benchmarks/results/operators.json]

Each operator is a model of its own. Artifacts in the folder are used; operators without one are searched first. Both
engines run interleaved, with bound inputs and outputs, on two threads. A quotient is ONNX Runtime's time divided by
Korch's, the median over the rounds. Rows of other operators than those of `--models` stay in the output file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from benchmarks.figures import spread
from benchmarks.rows import artifact_of, artifacts_of, known_rows, options_of, write_rows
from benchmarks.suite import quotients
from korch.cli.bench import bench
from korch.options import Options

GOAL = 0.9
FRAMES = ((16_000, 400, 160), (16_000, 1024, 256), (160_000, 400, 160), (160_000, 512, 128), (160_000, 1024, 256))
"""Samples, and the lengths and the steps of frames of them."""

Shape = tuple[int, ...]


def operator(
    op: str,
    shape: Shape,
    out: Shape,
    constants: dict[int, Any],
    opset: int = 20,
    element: int = TensorProto.FLOAT,
    **attributes: int,
) -> bytes:
    """Return a model of one operator with the input x, and constants for other inputs by their position."""
    names = ["x", *("" for _ in range(max(constants, default=0)))]
    for i in constants:
        names[i] = f"c{i}"
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)],
        op,
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, out)],
        [numpy_helper.from_array(np.asarray(value), f"c{i}") for i, value in constants.items()],
    )
    return _model(graph, opset)


def gather_elements(shape: Shape, index: Shape, axis: int) -> bytes:
    """Return a model of GatherElements whose indices are x modulo the length of the axis."""
    text = (
        f"g (float[{','.join(map(str, shape))}] x, int64[{','.join(map(str, index))}] i) => "
        f"(float[{','.join(map(str, index))}] y) {{ y = GatherElements <axis = {axis}> (x, i) }}"
    )
    return _model(parser.parse_graph(text), 20)


def selective_scan(steps: int, channels: int, state: int) -> bytes:
    """Return a model of the scan of a state space model: h = a h + b, y = the sum of c h."""
    inner, row = f"float[{channels},{state}]", f"float[{state}]"
    stack, stacked = f"float[{steps},{channels},{state}]", f"float[{steps},{channels}]"
    body = (
        f"s ({inner} p, {inner} u, {inner} v, {row} w) => ({inner} q, float[{channels}] r) "
        "{ m = Mul(p, u) q = Add(m, v) n = Mul(q, w) r = ReduceSum <keepdims = 0> (n, last) }"
    )
    text = (
        f"g ({inner} h0, {stack} a, {stack} b, float[{steps},{state}] c) => ({inner} h, {stacked} y) "
        f"<int64[1] last = {{1}}> {{ h, y = Scan <num_scan_inputs = 3, body = {body}> (h0, a, b, c) }}"
    )
    return _model(parser.parse_graph(text), 18)


def _model(graph: onnx.GraphProto, opset: int) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    content: bytes = model.SerializeToString()
    return content


def cases() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the model of each row."""
    large, square = (32, 128, 768), (1000, 1000)
    for shape, axis, element, flags in (
        ((1, 50), 1, "FLOAT", {}),
        *((large, axis, "FLOAT", {}) for axis in range(3)),
        (large, 1, "INT64", {}),
        (large, 0, "FLOAT", {"reverse": 1}),
        (large, 2, "FLOAT", {"exclusive": 1, "reverse": 1}),
        *((square, axis, element, {}) for axis in (0, 1) for element in ("FLOAT", "INT64")),
        (square, 0, "FLOAT", {"exclusive": 1}),
        ((2000, 500), 0, "FLOAT", {}),
        ((300, 5000), 0, "FLOAT", {}),
        ((16, 100_000), 0, "FLOAT", {"exclusive": 1, "reverse": 1}),
        ((8, 500, 33), 1, "FLOAT", {}),
        ((1, 2048, 8), 1, "FLOAT", {}),
        ((100_000,), 0, "FLOAT", {"reverse": 1}),
        ((10_000_000,), 0, "FLOAT", {}),
    ):
        words = [
            "cumsum",
            "x".join(map(str, shape)),
            f"axis {axis}",
            *(["int64"] if element == "INT64" else []),
            *flags,
        ]
        kind = TensorProto.DataType.Value(element)
        yield " ".join(words), operator("CumSum", shape, shape, {1: np.int64(axis)}, 14, kind, **flags)
    sizes = (((8, 5), 1), ((1024, 1024), 0), ((1024, 1024), 1), ((128, 32000), 1), (large, 1), ((16, 1000, 33), 1))
    for shape, axis in sizes:
        yield f"gather {'x'.join(map(str, shape))} axis {axis}", gather_elements(shape, shape, axis)
    for batch, length, parts, flags in (
        (1, 128, 1, {"onesided": 1}),
        *((1, length, 1, {}) for length in (512, 1000, 1024, 4096)),
        (1, 251, 2, {"inverse": 1}),
        (8, 97, 2, {}),
        (100, 400, 1, {"onesided": 1}),
        *((100, length, 2, {}) for length in (1000, 1009, 1024, 4096)),
    ):
        words = ["dft", f"{batch}x{length}", "real" if parts == 1 else "complex", *flags]
        out = (batch, length // 2 + 1 if "onesided" in flags else length, 2)
        yield " ".join(words), operator("DFT", (batch, length, parts), out, {2: np.int64(1)}, **flags)
    for samples, length, step in FRAMES:
        frames = (1, (samples - length) // step + 1, length // 2 + 1, 2)
        window = np.hanning(length).astype(np.float32)
        name = f"stft {length} by {step}" + (f" of {samples}" if samples < 160_000 else "")
        yield name, operator("STFT", (1, samples, 1), frames, {1: np.int64(step), 2: window}, 17)
    for steps, channels, state in ((8, 64, 16), (64, 64, 16), (64, 512, 16), (512, 64, 16)):
        yield f"scan {steps} steps of {channels}x{state}", selective_scan(steps, channels, state)


def measure(name: str, model: bytes, folder: Path, budget_s: float, rounds: int) -> dict[str, Any]:
    """Search a plan if the folder has none, and return the comparison."""
    path, artifact = (folder / f"{name.replace(' ', '-')}.{end}" for end in ("onnx", "korch"))
    path.write_bytes(model)
    artifact_of(path, artifact, threads=2, budget=budget_s, cache_folder=folder / "cache", progress=False)
    return {"comparison": bench(artifact, ["onnxruntime"], path, rounds, Options(threads=2), {}).to_json()}


def main() -> int:
    """Compare; return 1 if a median quotient is below `GOAL`."""
    models = dict(cases())
    args = options_of(__doc__, dict.fromkeys(name.split()[0] for name in models), budget_s=10.0).parse_args()
    rows = known_rows(args.output)
    with artifacts_of(args) as folder:
        for name, model in models.items():
            if name.startswith(tuple(args.models.split(","))):
                rows[name] = measure(name, model, folder, args.budget, args.rounds)
                print(name, spread(quotients(rows[name])["onnxruntime"]), flush=True)
                write_rows(args.output, rows)
    return int(any(np.median(quotients(row)["onnxruntime"]) < GOAL for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
