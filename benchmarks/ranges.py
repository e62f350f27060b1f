"""Compares artifacts for ranges of sizes with exact plans and with other engines, at random sizes.

    python -m benchmarks.ranges [--models bert-2,bert,bert-2d,vit-4,llama,yolox,
                               mobilenetv2,resnet50,unet] [--budget 120]
                                [--sizes 8 | --at 1,2x64] [--exact 3] [--pairs 200] [--rounds 15]
                                [--artifacts FOLDER] [--output FILE.json]

Each model is exported once with one or two free dimensions, and optimized once for its range. ONNX Runtime and OpenVINO
read the same file. Sizes of two dimensions are written as 2x64. At a few of the random sizes, a plan for exactly that
size is searched with the same budget. All engines run interleaved in blocks of a few runs; the time of a block is its
fastest run, the first run excluded. A quotient is the median over the blocks. `--pairs` sets the number of pairs of a
kernel and a size, which no fit has seen, at which the choice by fitted costs is checked (models with one dimension).
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.models.efficientvit import build_efficientvit
from benchmarks.models.exported import export_model
from benchmarks.models.unet import build_unet
from benchmarks.models.yolox import build_yolox
from benchmarks.rows import artifacts_of, options_of, write_rows
from korch.api import optimize
from korch.inputs import random_arrays
from korch.limits import SearchLimits
from korch.loading import load
from korch.pipeline.fit_costs import kernel_ns
from korch.ranges.form import Sizes
from korch.ranges.plan import RangePlan
from korch.runtime.bind import SlotPlace
from korch.runtime.executable import Executable
from korch.runtime.padding import Fitting, PaddedPlan
from korch.runtime.ranged import RangedExecutable

Feeds = Mapping[str, np.ndarray]
Run = Callable[[Feeds], Any]

BLOCK, LEAST_BLOCK = 10, 4
"""The most and fewest runs of a block. After about six runs of a few ms other engines' weights left the caches."""

BLOCK_S = 0.2
"""A block with at least `LEAST_BLOCK` runs ends after this time, in seconds."""

NEAR = 1.10
"""A choice is good if its time is at most this many times the time of the best one."""

PAUSE_S = 0.01
"""The pause, in seconds, between two engines, so that the threads of one are idle when the next runs."""


@dataclass(frozen=True)
class Ranged:
    """A model with free dimensions."""

    build: Callable[[], onnx.ModelProto]  # returns the model
    dimensions: Mapping[str, range]  # all sizes of each free dimension
    alone: Sizes  # the first sizes for which an exact plan is searched; the search for the range is compared with it
    ties: Mapping[str, str] = field(default_factory=dict)  # dimensions that always have the size of another one

    def shapes_at(self, sizes: Sizes) -> dict[str, int]:
        """Return all dimensions at some sizes."""
        free = dict(zip(self.dimensions, sizes, strict=True))
        return free | {name: free[other] for name, other in self.ties.items()}

    def has(self, sizes: Sizes) -> bool:
        """Return whether all sizes are in the ranges of their dimensions."""
        own = list(self.dimensions.values())
        return len(sizes) == len(own) and all(n in sizes_ for n, sizes_ in zip(sizes, own, strict=True))

    def random(self, count: int) -> list[Sizes]:
        """Return up to `count` random sizes without the ends of the ranges and without `alone`."""
        rng, found = np.random.default_rng(7), dict[Sizes, None]()
        inner = [sizes[1:-1] for sizes in self.dimensions.values()]
        while len(found) < min(count, math.prod(map(len, inner)) - 1):
            sizes = tuple(int(rng.choice(own)) for own in inner)
            if sizes != self.alone:
                found[sizes] = None
        return list(found)


TOKENS = {"input_ids": {1: "length"}, "attention_mask": {1: "length"}}
BATCHES = {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: "length"}}
EMBEDDED = {"inputs_embeds": {1: "length"}}
IMAGES = {"pixel_values": {0: "batch"}}
PIXELS = {2: "h", 3: "w"}
SQUARE = {"w": "h"}
AREAS = {"h": range(224, 641, 32), "w": range(224, 641, 32)}

MODELS: Mapping[str, Ranged] = {
    "bert-2": Ranged(
        partial(export_model, "bert:script", TOKENS, layers=2, vocabulary=2000), {"length": range(1, 129)}, (32,)
    ),
    "bert": Ranged(partial(export_model, "bert:script", TOKENS, vocabulary=2000), {"length": range(1, 513)}, (128,)),
    "bert-2d": Ranged(
        partial(export_model, "bert:script", BATCHES, layers=2, vocabulary=2000),
        {"batch": range(1, 33), "length": range(16, 513)},
        (8, 64),
    ),
    "vit-4": Ranged(
        partial(export_model, "vit:script", IMAGES, layers=4, hidden=384, heads=6), {"batch": range(1, 9)}, (2,)
    ),
    "llama": Ranged(partial(export_model, "llama:dynamo", EMBEDDED), {"length": range(1, 257)}, (64,)),
    "yolox": Ranged(partial(build_yolox, free=("h", "w")), {"h": range(160, 641, 32)}, (320,), SQUARE),
    "mobilenetv2": Ranged(partial(export_model, "mobilenetv2:script", {"pixel_values": PIXELS}), AREAS, (320, 320)),
    "yolox-batch": Ranged(partial(build_yolox, size=320, free=("batch",)), {"batch": range(1, 9)}, (4,)),
    "yolox-area": Ranged(partial(build_yolox, free=("h", "w")), AREAS, (320, 320)),
    "efficientvit-batch": Ranged(partial(build_efficientvit, size=224, free=("batch",)), {"batch": range(1, 9)}, (4,)),
    "efficientvit-area": Ranged(partial(build_efficientvit, free=("h", "w")), AREAS, (320, 320)),
    "swin": Ranged(partial(export_model, "swin:script", {"image": PIXELS}), {"h": range(224, 449, 32)}, (320,), SQUARE),
    "crnn": Ranged(partial(export_model, "crnn:script", {"image": {3: "width"}}), {"width": range(32, 513)}, (128,)),
    "speech": Ranged(
        partial(export_model, "speech:script", {"spectrogram": {2: "frames"}}), {"frames": range(1, 1501)}, (400,)
    ),
    "text": Ranged(
        partial(export_model, "bert:script", BATCHES, layers=4, hidden=384, heads=6, vocabulary=2000),
        {"batch": range(1, 17), "length": range(1, 129)},
        (4, 32),
    ),
    "resnet50-batch": Ranged(
        partial(export_model, "resnet50:script", {"pixel_values": {0: "batch"}}), {"batch": range(1, 9)}, (4,)
    ),
    "mobilenetv2-batch": Ranged(
        partial(export_model, "mobilenetv2:script", {"pixel_values": {0: "batch"}}), {"batch": range(1, 9)}, (4,)
    ),
    "resnet50": Ranged(partial(export_model, "resnet50:script", {"pixel_values": PIXELS}), AREAS, (320, 320)),
    "unet": Ranged(build_unet, {"h": range(64, 513, 16), "w": range(64, 513, 16)}, (256, 256)),
}
"""Transformers have random weights; the sizes of YOLOX's square images are multiples of 32, as it requires."""


def main() -> int:
    """Compare; return 1 if an artifact for a range is slower than another engine at one of the sizes."""
    parser = options_of(__doc__, MODELS, budget_s=120.0)
    parser.add_argument("--sizes", type=int, default=8, help="random sizes, besides the two ends")
    parser.add_argument("--at", type=_numbers, default=(), help="compare these sizes, not random ones")
    parser.add_argument("--exact", type=int, default=3, help="at how many sizes an exact plan is searched")
    parser.add_argument("--pairs", type=int, default=0, help="kernels at sizes at which the choice is judged")
    args = parser.parse_args()
    for name in args.models.split(","):
        if outside := [sizes for sizes in args.at if not MODELS[name].has(sizes)]:
            parser.error(f"{name} has no size {_text(outside[0])}: {MODELS[name].dimensions}")
    rows: dict[str, Any] = {}
    for name in args.models.split(","):
        with artifacts_of(args) as folder:
            rows[name] = measure(name, MODELS[name], folder, args)
        write_rows(args.output, rows)
    return int(any(row["quotients"][peer] < 1 for rows_ in rows.values() for row in rows_["sizes"] for peer in PEERS))


def _numbers(text: str) -> tuple[Sizes, ...]:
    return tuple(tuple(map(int, sizes.split("x"))) for sizes in text.split(","))


def _text(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def measure(name: str, model: Ranged, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Optimize a model for its range and for some exact sizes; return the comparison."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        onnx.save(model.build(), str(path))
    inner = list(args.at) or model.random(args.sizes)
    exact = [model.alone, *inner][: args.exact]
    ends = [tuple(own[i] for own in model.dimensions.values()) for i in (0, -1)]
    chosen = sorted({*inner, *exact} if args.at else {*ends, *inner, *exact})
    ranged, search = _artifact(path, folder / f"{name}.korch", {**model.dimensions, **model.ties}, args)
    if not isinstance(ranged, RangedExecutable):
        raise AssertionError("an artifact of one size")
    peers = {peer: start(path) for peer, start in PEERS.items()}
    rows, alone = [], {}
    for sizes in chosen:
        steps = tuple(n // own.step for n, own in zip(sizes, model.dimensions.values(), strict=True))
        feeds = _feeds(ranged, steps)
        engines: dict[str, Run] = {"korch": partial(_run, ranged), **peers}
        if sizes in exact:
            exact_path = folder / f"{name}-{_text(sizes)}.korch"
            one, alone[_text(sizes)] = _artifact(path, exact_path, model.shapes_at(sizes), args)
            engines["exact"] = partial(_run, one)
        times = _times(engines, feeds, args.rounds)
        own = np.array(times["korch"])
        rows.append(
            {
                "size": sizes[0] if len(sizes) == 1 else _text(sizes),
                "ms": {engine: float(np.median(found)) for engine, found in times.items()},
                "quotients": {e: float(np.median(np.array(found) / own)) for e, found in times.items() if e != "korch"},
                "choice": _choice(ranged, steps, feeds, args.rounds),
            }
        )
        print(name, rows[-1], flush=True)
    about = {"plans": len(ranged.executables), "search": search, "alone": alone}
    if own_search := alone.get(_text(model.alone)):
        about["search_quotients"] = {what: n / max(1, own_search[what]) for what, n in search.items()}
    return {**about, "pairs": judge(ranged, args.pairs, args.rounds) if args.pairs else None, "sizes": rows}


def _artifact(
    path: Path, artifact: Path, shapes: Mapping[str, Any], args: argparse.Namespace
) -> tuple[Any, dict[str, float]]:
    """Return an executable, and the seconds of its search with the number of kernels that were timed."""
    about = artifact.with_suffix(".json")
    if not (artifact.exists() and about.exists()):
        begun_s = time.monotonic()
        found = optimize(path, shapes=shapes, budget=args.budget)
        found.save(artifact)
        several = isinstance(found, RangedExecutable)
        searches = zip(found.ranges.plans, found.executables, strict=True) if several else ()
        reports = {plan.sizes: executable.report for plan, executable in searches} or {(): found.report}
        timed = sum(report.timed_kernels for report in reports.values())
        about.write_text(json.dumps({"seconds": time.monotonic() - begun_s, "timed": timed}))
    return load(artifact), json.loads(about.read_text("utf-8"))


def _run(executable: Any, feeds: Feeds) -> Any:
    return executable.run(None, feeds)


def _feeds(ranged: RangedExecutable, sizes: Sizes) -> Feeds:
    infos = ranged.inputs_at(sizes)
    return random_arrays({info.name: (tuple(info.shape), info.dtype) for info in infos}, sizes[0])


def _onnxruntime(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def _openvino(path: Path) -> Run:
    import openvino

    properties = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": 2,
        "INFERENCE_PRECISION_HINT": "f32",  # on machines with matrix units the default is bfloat16
    }
    compiled = openvino.Core().compile_model(openvino.Core().read_model(str(path)), "CPU", properties)
    request = compiled.create_infer_request()
    return request.infer  # type: ignore[no-any-return]


PEERS: Mapping[str, Callable[[Path], Run]] = {"onnxruntime": _onnxruntime, "openvino": _openvino}


def _times(engines: Mapping[str, Run], feeds: Feeds, rounds: int) -> dict[str, list[float]]:
    """Return the time of each block of each engine, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, run in engines.items():
            runs: list[float] = []
            while len(runs) < LEAST_BLOCK or (len(runs) < BLOCK and sum(runs) < 1e3 * BLOCK_S):
                begun_s = time.perf_counter()
                run(feeds)
                runs.append(1e3 * (time.perf_counter() - begun_s))
            time.sleep(PAUSE_S)
            if turn:
                times[name].append(min(runs[1:]))
    return times


def _choice(ranged: RangedExecutable, sizes: Sizes, feeds: Feeds, rounds: int) -> float:
    """Return the time of the plan that is chosen for some sizes, divided by the time of the fastest plan for them."""
    chosen, _ = ranged.serving(sizes)
    arrays = list(feeds.values())
    engines: dict[str, Run] = {}
    for i, (executable, plan) in enumerate(zip(ranged.executables, ranged.ranges.plans, strict=True)):
        if plan.serves(sizes):
            fitting = Fitting(PaddedPlan(executable, plan), sizes)
            engines[str(i)] = lambda _, fitting=fitting: fitting.run(arrays)
    if len(engines) < 2:
        return 1.0
    medians = {name: float(np.median(found)) for name, found in _times(engines, feeds, rounds).items()}
    return medians[str(ranged.executables.index(chosen))] / min(medians.values())


def judge(ranged: RangedExecutable, count: int, rounds: int) -> dict[str, Any]:
    """Return how good the choice by fitted costs is, for kernels and for whole plans, at sizes that no fit has seen.

    Kernels are compared if another plan for the same upper size has a different kernel for the same values.

    Args:
        ranged: an executable for a range of one dimension.
        count: the approximate number of pairs of a kernel and a size.
        rounds: the number of rounds in which the kernels are timed.
    """
    plans = list(zip(ranged.executables, ranged.ranges.plans, strict=True))
    (dimension,) = ranged.ranges.dimensions
    seen = {sample.sizes[0] for _, plan in plans for cost in plan.costs for sample in cost.samples}
    held = [n for n in range(dimension.low, dimension.high + 1) if n not in seen]
    found: list[dict[str, Any]] = []
    for size in np.random.default_rng(11).permutation(held).tolist():
        if len(found) >= count:
            break
        able = [(e, plan) for e, plan in plans if plan.serves((size,)) and plan.costs]
        times = kernel_ns(able, (size,), SearchLimits(fit_rounds=rounds))
        found += [{"size": size * dimension.step, **pair} for pair in _pairs(able, times, (size,))]
    quotients = [pair["chosen"] for pair in found]
    within = float(np.mean([q <= NEAR for q in quotients])) if found else None
    return {"count": len(found), "within": within, "worst": max(quotients, default=None), "pairs": found}


def _pairs(
    plans: Sequence[tuple[Executable, RangePlan]], times: Sequence[Sequence[float]], sizes: Sizes
) -> Iterator[dict[str, Any]]:
    """Yield the time of each chosen kernel and of the chosen plan, divided by the time of the fastest one."""
    same: dict[str, dict[str, tuple[float, float]]] = {}
    for (executable, plan), row in zip(plans, times, strict=True):
        steps = [step for step in executable.plan.steps if step.runs]
        for step, cost, time_ns in zip(steps, plan.costs, row, strict=True):
            ports = (
                [p.value for p in step.inputs if p.place != SlotPlace.CONSTANT.value],
                [p.value for p in step.outputs],
            )
            kernel = f"up to {plan.sizes}: {ports[0]} -> {ports[1]}"
            same.setdefault(kernel, {})[step.symbol] = cost.at(sizes), time_ns
        same.setdefault("plan", {})[f"up to {plan.sizes} at {plan.timed}"] = plan.cost_ns(sizes), sum(row)
    for kernel, variants in same.items():
        if len(variants) > 1:
            chosen = min(variants.values())[1] / min(time_ns for _, time_ns in variants.values())
            yield {"kernel": kernel, "variants": len(variants), "chosen": chosen}


if __name__ == "__main__":
    sys.exit(main())
