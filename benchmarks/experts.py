"""Compares blocks of experts (Mixtral- and Qwen-MoE-like) with other engines, in each form that an engine can run.

    python -m benchmarks.experts [--models mixtral,qwen] [--tokens 1,16,128,1024] [--budget 60] [--rounds 15]
                                 [--artifacts FOLDER] [--output FILE.json]

Weights and tokens are random, from fixed seeds. ONNX Runtime and OpenVINO read the block in ONNX in three forms: with
gathered weights, with all experts computed, and with a loop over experts. ONNX Runtime also runs its own operator.
PyTorch runs the module of the transformers library with each of its implementations of experts, and Inductor compiles
those that it can. All runs are interleaved. If the gathered weights are larger than 512 MB, only Korch runs the forms
that gather. For one token Korch also runs the form with all experts computed. Artifacts in the folder are used; missing
ones are searched first. Each row is written when it is complete, and rows in the file are not measured again.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.models.experts import BLOCKS, FORMS, module_of, onnx_of, tokens_of
from benchmarks.rows import artifact_of, artifacts_of, known_rows, options_of, write_rows
from benchmarks.suite import KEPT
from korch.loading import load
from korch.options import Options
from korch.records import plain
from korch.report.compare import RunnerSpec, Settings, compare

MOST_GATHERED_BYTES = 512 << 20
"""If the gathered weights have more bytes, the other engines do not run the forms that gather."""

TORCH = {"EAGER_LOOP": False, "EAGER_GROUPED": False, "INDUCTOR_GROUPED": False, "EAGER_GATHER": True}
TORCH |= {"INDUCTOR_GATHER": True}
"""The peers of `benchmarks.peers` for blocks of experts, and whether each gathers weights."""

OPERATOR = "operator"
"""The form that only ONNX Runtime reads."""


def main() -> None:
    """Compare, and print each comparison."""
    parser = options_of(__doc__, BLOCKS)
    parser.add_argument("--tokens", default="1,16,128,1024")
    parser.add_argument("--search-only", action="store_true", help="only make the artifacts")
    args = parser.parse_args()
    rows = known_rows(args.output, "blocks")
    for name in args.models.split(","):
        for tokens in map(int, args.tokens.split(",")):
            key = f"{name}-{tokens}"
            with artifacts_of(args) as kept:
                runners = list(_runners(name, tokens, kept, args.budget))
                if args.search_only or key in rows:
                    continue
                rows[key] = _measure(name, tokens, runners, args.rounds)
            write_rows(args.output, rows, "blocks")


def _runners(name: str, tokens: int, folder: Path, budget: float | None) -> Iterator[RunnerSpec]:
    """Yield what is compared for a block and a number of tokens; write the missing models and artifacts."""
    gathers = BLOCKS[name].gathered_bytes(tokens) <= MOST_GATHERED_BYTES
    for form in FORMS:
        path = folder / f"{name}-{tokens}-{form}.onnx"
        if not path.exists():
            model = onnx_of(name, tokens, form)
            if model is None:
                continue
            onnx.save(model, path)
        if form == "gather":
            yield RunnerSpec("korch", _artifact(path, budget))
        if form == "dense" and tokens == 1:
            yield RunnerSpec("korch", _artifact(path, budget), "korch dense")
        if form != "gather" or gathers:
            yield RunnerSpec("onnxruntime", path, f"onnxruntime {form}")
            if form != OPERATOR:
                yield RunnerSpec("openvino", path, f"openvino {form}")
    for peer, is_gathered in TORCH.items():
        if gathers or not is_gathered:
            label = peer.lower().replace("_", " ")
            yield RunnerSpec(f"benchmarks.peers:{peer}", folder / f"{name}-{tokens}.onnx", label)


def _artifact(model: Path, budget: float | None) -> Path:
    return artifact_of(model, model.with_suffix(".korch"), budget=budget, cache_folder=model.parent / "cache")


def _measure(name: str, tokens: int, runners: list[RunnerSpec], rounds: int) -> dict[str, Any]:
    import torch

    x, module = tokens_of(name, tokens), module_of(name).double()
    with torch.no_grad():
        expected = module(torch.from_numpy(x).double()).numpy().astype(np.float32)
        numbers = module.gate(torch.from_numpy(x).double())[-1].numpy()
    settings = Settings(threads=Options().threads, rounds=rounds, leave_out=True)
    comparison = compare(runners, {"x": x}, settings, [expected])
    print(f"{name}, {tokens} tokens\n{comparison.to_text()}\n", flush=True)
    (korch,) = (spec.path for spec in runners if spec.name == "korch")
    report = load(korch).report
    return {
        "chosen": len(np.unique(numbers)),
        "report": {key: plain(getattr(report, key)) for key in KEPT},
        "comparison": comparison.to_json(),
    }


def best_of(row: dict[str, Any], engine: str) -> tuple[str, np.ndarray[Any, Any]] | None:
    """Return an engine's fastest form with correct results, and its times divided by Korch's, by round."""
    found = {r["name"]: r for r in row["comparison"]["rows"] if r["max_error"] is not None and r["max_error"] < 1e-4}
    own = [r for n, r in found.items() if n.startswith(engine)]
    if not own:
        return None
    best = min(own, key=lambda r: r["median_ms"])
    return best["name"].removeprefix(engine).strip(), np.array(best["times_ns"]) / np.array(found["korch"]["times_ns"])


if __name__ == "__main__":
    main()
