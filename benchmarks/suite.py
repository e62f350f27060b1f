"""Optimizes each benchmark model, and compares it with other engines in one interleaved run.

    python -m benchmarks.suite [--models candy,bert] [--against onnxruntime,openvino,iree]
                               [--budget 200] [--rounds 15] [--output FILE.json] [--plot FILE.svg]
                               (also eager)

`--models` also takes models of transformers, exported by PyTorch's exporters:
`mobilenetv2`, `segformer_b0:dynamo`, ... (`benchmarks/models/exported.py`).

The default is the five models of the paper, two vision models that PyTorch exports and, if PyTorch and transformers
are installed, four transformers. Each model without an artifact is searched in a separate process with an empty cache,
so the reported search time is that of a complete search. Engines are timed interleaved, and a quotient is the median
over the rounds. If an engine can't run a model, the row says why. The file records the CPU and the versions of all
libraries.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.models import PAPER, build
from benchmarks.models.exported import export_model, is_exported
from benchmarks.models.transformers import TRANSFORMERS, export_transformer
from benchmarks.peers import full_name
from benchmarks.rows import artifact_of, in_process, options_of, write_rows
from korch.cli.bench import bench
from korch.loading import load as load_artifact
from korch.options import Options
from korch.records import plain
from korch.report.peers import get_peer

MODELS = (*PAPER, *TRANSFORMERS, "mobilenetv2", "segformer_b0:script-slim")
AGAINST = "onnxruntime,openvino,inductor,iree"
"""The engines to compare with. An engine that is not installed is skipped."""
TOLERANCE = 1e-3
"""The largest error of a result; Winograd convolutions have about 1e-5 per layer, and a model has up to a hundred."""
MODULE = "benchmarks.peers:TRANSFORMER"
"""The peer that compiles a transformer's module by Inductor; other models are translated from ONNX for Inductor."""
KEPT = (
    "status",
    "predicted_ms",
    "expected_ms",
    "measured_ms",
    "lower_bound_ms",
    "gap",
    "primitives",
    "alternatives",
    "given_flop",
    "flop",
    "candidates",
    "distinct_candidates",
    "measured_candidates",
    "kernels",
    "max_error",
    "rms_error",
    "arena_bytes",
    "seconds",
    "plan",
    "plans",
)


def main() -> int:
    """Run all models; return 1 if one fails."""
    parser = options_of(__doc__, MODELS)
    parser.add_argument(
        "--against", default=AGAINST, help=f"those of them that are installed are compared (default: {AGAINST})"
    )
    parser.add_argument("--plot", type=Path, help="draw the results, too (needs matplotlib)")
    args = parser.parse_args()
    found = {name: get_peer(full_name(name)).is_available() for name in args.against.split(",")}
    for name, reason in found.items():
        if reason is not None:
            print(f"without {name}: {reason}")
    against = [name for name, reason in found.items() if reason is None]
    if args.artifacts is not None:
        args.artifacts.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    failed = []
    for name in args.models.split(","):
        try:
            rows[name] = row = in_process(measure, name, against, args.rounds, args.budget, args.artifacts)
        except Exception as error:  # noqa: BLE001 - whatever fails, the other models are run
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        if differs(row):
            failed.append(name)
        write_rows(args.output, rows)
    if args.plot is not None and rows:
        from benchmarks.plot import draw

        draw({name: quotients(row) for name, row in rows.items()}, args.plot)
    for name in failed:
        print(f"{name} failed")
    return int(bool(failed))


def load(name: str) -> onnx.ModelProto:
    """Return the ONNX model with this name."""
    if name in TRANSFORMERS:  # as `korch.optimize` reads the module; not every version can be traced
        return export_transformer(name).stored()
    return export_model(name) if is_exported(name) else build(name)


def measure(
    name: str, against: list[str], rounds: int, budget_s: float | None, artifacts: Path | None
) -> dict[str, Any]:
    """Compare one model and return the row; it is optimized first, with an empty cache, if there is no artifact."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"{name}.onnx"
        artifact = (artifacts or Path(folder)) / f"{name}.korch"
        model.write_bytes(load(name).SerializeToString())
        executable: Any = load_artifact(artifact_of(model, artifact, budget=budget_s))
        report = {key: plain(getattr(executable.report, key)) for key in KEPT}
        del executable  # frees its weights and threads, which are not part of the comparison
        engines = [MODULE if peer == "inductor" and name in TRANSFORMERS else full_name(peer) for peer in against]
        comparison = bench(artifact, engines, model, rounds, Options(), {})
    print(f"{name}\n{comparison.to_text()}\n", flush=True)
    return {"comparison": comparison.to_json(), "report": report}


def differs(row: dict[str, Any]) -> bool:
    """Return whether Korch's results are not those of ONNX Runtime, if it was compared."""
    errors = [own["max_error"] for own in row["comparison"]["rows"] if own["name"] == "onnxruntime"]
    return any(error is None or error > TOLERANCE for error in errors)


def quotients(row: dict[str, Any]) -> dict[str, Any]:
    """Return each engine's time divided by Korch's, for each round."""
    times = {r["name"]: np.array(r["times_ns"], float) for r in row["comparison"]["rows"]}
    own = times.pop("korch")
    return {name: taken / own for name, taken in times.items()}


if __name__ == "__main__":
    sys.exit(main())
