"""The benchmark models: optimize each, and compare it with other engines in one interleaved run.

    python -m benchmarks.suite [--models candy,transformer_block] [--against onnxruntime,openvino]
                               [--rounds 15] [--output FILE.json]

Every figure is a ratio or a median of one run on one machine; the file records its CPU and the
versions of all libraries.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.models import build
from korch.api import optimize
from korch.options import Options
from korch.report.bench import bench

MODELS = ("candy", "transformer_block")
PACKAGES = ("onnxruntime", "openvino", "onednn-cpu-gomp", "ortools", "numpy", "onnx", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--against", default="onnxruntime,openvino")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parsed = parser.parse_args()
    rows = {name: measure(name, parsed.against.split(","), parsed.rounds)
            for name in parsed.models.split(",")}  # fmt: skip
    found = {"machine": machine(), "models": rows}
    if parsed.output is not None:
        parsed.output.parent.mkdir(parents=True, exist_ok=True)
        parsed.output.write_text(json.dumps(found, indent=1) + "\n")


def measure(name: str, against: list[str], rounds: int) -> dict[str, Any]:
    """Optimize one model and compare it; print the table."""
    with tempfile.TemporaryDirectory() as folder:
        model, artifact = Path(folder) / f"{name}.onnx", Path(folder) / f"{name}.korch"
        model.write_bytes(build(name).SerializeToString())
        executable = optimize(model)
        executable.save(artifact)
        comparison = bench(artifact, against, model, rounds, Options(), {})
    print(f"{name}\n{comparison.to_text()}\n", flush=True)
    kept = ("status", "predicted_ms", "measured_ms", "lower_bound_ms", "gap", "primitives",
            "alternatives", "candidates", "distinct_candidates", "measured_candidates", "kernels",
            "max_error", "arena_bytes", "seconds", "plan", "contest")  # fmt: skip
    report = {key: executable.report[key] for key in kept}
    return {"comparison": comparison.to_json(), "report": report}


def machine() -> dict[str, Any]:
    """Return the CPU's model and the versions of what took part."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.machine(), "cores": len(names),
            "python": platform.python_version(), "versions": versions}  # fmt: skip


if __name__ == "__main__":
    main()
