"""Compares engines while other processes are busy: one interleaved run for each number of busy processes.

    python -m benchmarks.busy [--models mobilenetv2,bert] [--against onnxruntime,openvino]
                              [--busy 0,1,2] [--rounds 15] [--budget 100] [--artifacts FOLDER]
                              [--output FILE.json]

On shared servers, an engine's speed depends on how its threads wait while one of them has no core.
A busy process computes without pause, at the same priority.

Artifacts in the folder are used; models without an artifact are searched first. Each row is written when it is
complete, and rows in the file are not measured again, so an interrupted run can be continued.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.rows import artifact_of, artifacts_of, known_rows, options_of, write_rows
from benchmarks.suite import MODELS, load, quotients
from korch.cli.bench import bench
from korch.options import Options


def main() -> int:
    """Compare; return 1 if Korch is slower than ONNX Runtime in any row."""
    parser = options_of(__doc__, MODELS)
    parser.add_argument("--against", default="onnxruntime,openvino")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy processes")
    args = parser.parse_args()
    rows = known_rows(args.output, "rows")
    counts = [int(count) for count in args.busy.split(",")]
    for name in args.models.split(","):
        todo = [n for n in counts if (name, n) not in {(r["model"], r["busy"]) for r in rows}]
        for row in measure(name, todo, args):
            rows.append(row)
            write_rows(args.output, rows, "rows")
    found = (quotients({"comparison": row}).get("onnxruntime", [1.0]) for row in rows)
    return int(any(np.median(quotient) < 1 for quotient in found))


def measure(name: str, counts: list[int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a model's row for each number of busy processes."""
    if not counts:
        return
    with artifacts_of(args) as folder:
        model = folder / f"{name}.onnx"
        model.write_bytes(load(name).SerializeToString())
        artifact = artifact_of(model, folder / f"{name}.korch", budget=args.budget)
        for count in counts:
            with busy_processes(count):
                found = bench(artifact, args.against.split(","), model, args.rounds, Options(), {})
            row = {"model": name, "busy": count, **found.to_json()}
            print(f"{name} beside {count}\n{found.to_text()}\n", flush=True)
            yield row


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run this many busy processes within the context."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
