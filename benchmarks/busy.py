"""Engines beside processes that want the cores, too: one interleaved run for each number of them.

    python -m benchmarks.busy MODEL.korch MODEL.onnx [--against onnxruntime,openvino]
                              [--busy 0,1,2] [--rounds 15] [--output FILE.json]

Servers are shared: what an engine's threads do while they wait decides what is left of its speed
when one of them has no core. A busy process computes all the time, at the same priority.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.suite import machine
from korch.options import Options
from korch.report.bench import bench


def main() -> int:
    """Compare; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--against", default="onnxruntime,openvino")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for count in map(int, args.busy.split(",")):
        with busy_processes(count):
            found = bench(
                args.artifact, args.against.split(","), args.model, args.rounds, Options(), {}
            )
        times = "  ".join(
            f"{row.name} {row.median_ms:.1f} ms ({row.p10_ms:.1f} to {row.p90_ms:.1f})"
            for row in found.rows
        )
        print(f"beside {count}: {times}", flush=True)
        if found.speedup is not None:
            print(f"  {found.speedup.median:.2f}x as fast as {found.speedup.over}", flush=True)
        rows.append({"model": args.model.stem, "busy": count, **found.to_json()})
    if args.output:
        known = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
        kept = [row for row in known if row["model"] != args.model.stem]
        found_file = {"machine": machine(), "rows": [*kept, *rows]}
        args.output.write_text(json.dumps(found_file, indent=1) + "\n")
    return 0


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep so many processes computing."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
