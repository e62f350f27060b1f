"""Compares one step of language models with other engines, and with reading as many bytes, in interleaved runs.

    python -m benchmarks.decode [--models small] [--dtypes float32,int4] [--fills 128,1024] [--budget 120]
                                [--sessions] [--prompts 128,512] [--tokens 512] [--state float32,int8]
                                [--artifacts FOLDER] [--output benchmarks/results/decode.json]

A step reads one token with a full cache of as many rows as the fill says, and returns the logits and the longer cache:
the sizes are static. With `--sessions`, the cache may have any number of rows; Korch keeps it in a session, llama.cpp
in its context, and the others take and return it; `--state` is the type in which Korch keeps it; with several types,
the sessions are compared, too. There, a prompt of as
many tokens as `--prompts` says is read with an empty cache, too; all engines return the logits of its last token.
`--tokens` compares greedy tokens with those of float64. Models have random weights (`benchmarks/models/decoder.py`).
llama.cpp runs a GGUF file with the same weights if llama-cpp-python and gguf are installed. Each engine has a process
of its own. One more process adds up as many bytes of float32 as the weights and the cache have, on the same threads: a
step can't be faster than its reads.
The file has the median time of each engine, and medians of quotients within the rounds with their 10th and 90th
percentiles.
"""

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import korch
from benchmarks.models.decoder import BITS, DECODERS, DTYPES, FLOATS, ROUNDED, build_decoder
from benchmarks.models.writer import save
from benchmarks.peers.llama import LLAMA, write_gguf
from benchmarks.rows import artifacts_of, known_rows, options_of, write_rows
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.numerics import FACTOR, least_tolerance
from korch.primitive import reference
from korch.report.compare import Comparison, RunnerSpec, Settings, compare
from korch.report.peers import get_peer
from korch.report.peers.artifact import ArtifactPeer
from korch.report.peers.peer import Array, Arrays, Run
from korch.runtime.generate import generate
from korch.runtime.stateful import StatefulExecutable

ENGINES = ("korch", "onnxruntime", "openvino")
MOST_ROWS = 4352
"""The rows that a session's cache has room for."""

READ_BUDGET_S = 30.0
"""The most seconds of the search for a kernel that reads bytes."""

MOST_PROMPT = 512
"""The most tokens that a session reads together."""

PROMPT = 16
"""The tokens before those that are compared with float64."""

ROW = 1 << 16
"""The float32 numbers that are added up to one result when bytes are read."""


@dataclass(frozen=True, slots=True)
class ReadPeer:
    """The sum of as many bytes as a step reads, by an artifact whose input has them."""

    name: str = "read"

    def is_available(self) -> str | None:
        """Return None: always available."""
        return None

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Load the artifact; its input is not that of the step."""
        x = np.ones((int(model_path.stem.split("-")[1]), ROW), np.float32)
        return ArtifactPeer().prepare(model_path, {"x": x}, threads)


READ = ReadPeer()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a model: its name, the type of its weights, the rows of its cache, and the new ones."""

    name: str
    dtype: str
    past: int
    rows: int = 1

    def inputs(self) -> Arrays:
        """Return the inputs of the step, with a random cache."""
        at, rng = DECODERS[self.name], np.random.default_rng(0)
        kind = FLOATS.get(self.dtype, FLOATS["float32"])[1]
        shape = (1, at.groups, self.past, at.head)
        found: Arrays = {
            "input_ids": rng.integers(0, at.vocabulary, (1, self.rows)),
            "attention_mask": np.ones((1, self.past + self.rows), np.int64),
            "position_ids": np.arange(self.past, self.past + self.rows)[None],
        }
        names = [f"past_key_values.{n}.{k}" for n in range(at.layers) for k in ("key", "value")]
        return found | {name: rng.standard_normal(shape, np.float32).astype(kind) for name in names}

    def bytes_read(self, weights: int) -> int:
        """Return the bytes that the step has to read: those of the weights and of the cache."""
        return weights + sum(array.nbytes for name, array in self.inputs().items() if name.startswith("past"))

    def saved(self, path: Path, **sizes: Any) -> int:
        """Build the model, unless its file is there; return the bytes of the weights that a step has to read."""
        size_path = path.with_suffix(".bytes")
        if not path.exists() or not size_path.exists():
            model = build_decoder(self.name, self.dtype, batch=1, **sizes)
            is_in_product = DECODERS[self.name].is_tied and self.dtype not in BITS
            read = (t for t in model.graph.initializer if is_in_product or not t.name.startswith("embeddings"))
            size_path.write_text(str(sum(len(t.raw_data) for t in read)))
            save(model, path)
        return int(size_path.read_text())


def main() -> int:
    """Measure all steps; rows that the file of results already has stay."""
    parser = options_of(__doc__, ("small",), budget_s=120.0)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--fills", default="128,1024,4096")
    parser.add_argument("--sessions", action="store_true", help="compare sessions, which keep the cache")
    parser.add_argument("--state", default="float32", help="the type in which sessions keep states of float32")
    parser.add_argument("--tokens", type=int, default=0, help="compare as many tokens of a session with float64")
    parser.add_argument("--prompts", default="", help="numbers of tokens that sessions read first, like 128,512")
    args = parser.parse_args()
    rows: dict[str, Any] = known_rows(args.output)
    with artifacts_of(args) as folder:
        state = args.state.partition(",")[0]
        for name in args.models.split(","):
            for dtype in args.dtypes.split(","):
                steps = [Step(name, dtype, int(past)) for past in args.fills.split(",") if past]
                if args.sessions:
                    steps += [Step(name, dtype, 0, int(rows)) for rows in args.prompts.split(",") if rows]
                for step in steps:
                    run = partial(measure_session, args.state.split(",")) if args.sessions else measure
                    what = f"prompt of {step.rows}" if step.rows > 1 else str(step.past)
                    key = f"{name} {dtype} {what}{' session' * args.sessions}{_state_text(state)}"
                    rows[key] = row = run(step, folder, args.budget, args.rounds)
                    write_rows(args.output, rows)
                    print(f"{key}: {_text(row)}", flush=True)
                if args.sessions and args.tokens:
                    key = f"{name} {dtype} tokens{_state_text(state)}"
                    step = Step(name, dtype, 0)
                    rows[key] = row = compare_tokens(state, step, folder, args.budget, args.tokens)
                    write_rows(args.output, rows)
                    print(f"{key}: {row}", flush=True)
    return 0


def measure(step: Step, folder: Path, budget_s: float, rounds: int) -> dict[str, Any]:
    """Return the times of all engines for a step; what is not in the folder is written to it."""
    path = folder / f"{step.name}-{step.dtype}-{step.past}.onnx"
    size = step.bytes_read(step.saved(path, seq=1, past=step.past))
    if not path.with_suffix(".korch").exists():
        _optimize(path, path.with_suffix(".korch"), budget_s)
    return _compared([*_runners(path), _reading(size, folder, budget_s)], step, folder, size, rounds)


def _compared(runners: list[RunnerSpec], step: Step, folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Return the times of engines, and of llama.cpp if it is installed, for a step that reads `size` bytes."""
    if LLAMA.is_available() is None:
        gguf = folder / f"{step.name}-{step.dtype}.gguf"
        if not gguf.exists():
            write_gguf(gguf, step.name, step.dtype)
        runners.append(RunnerSpec("benchmarks.peers.llama:LLAMA", gguf, LLAMA.name))
    found = compare(runners, step.inputs(), Settings(threads=2, rounds=rounds, leave_out=True), progress=_say)
    return {"bytes": size, **_figures(found, size)}


def measure_session(states: Sequence[str], step: Step, folder: Path, budget_s: float, rounds: int) -> dict[str, Any]:
    """Return the times of a step of a session, and of other engines whose cache may have any number of rows.

    `states`: the type of the session's states, and those of sessions with which it is compared, too.
    """
    artifact, *others = (_session_artifact(state, step, folder, budget_s) for state in states)
    path = folder / f"{step.name}-{step.dtype}.onnx"
    runners = [RunnerSpec("korch", artifact), *list(_runners(path))[1:]]
    runners += [
        RunnerSpec("korch", other, f"korch, states in {s}") for s, other in zip(states[1:], others, strict=True)
    ]
    size = step.bytes_read(step.saved(path, is_last=True))
    if step.rows == 1:
        runners.append(_reading(size, folder, budget_s))
    return _compared(runners, step, folder, size, rounds)


def _session_artifact(state: str, step: Step, folder: Path, budget_s: float) -> Path:
    """Return the artifact of a step's model, which is optimized if the folder has none."""
    path = folder / f"{step.name}-{step.dtype}.onnx"
    artifact = folder / f"{path.stem}{_state_text(state)}.korch"
    step.saved(path, is_last=True)
    if not artifact.exists():
        sizes = "--shape", f"past=0..{MOST_ROWS - 1}", "--shape", f"seq=1..{MOST_PROMPT}"
        _optimize(path, artifact, budget_s, *sizes, "--state", state)
    return artifact


def compare_tokens(state: str, step: Step, folder: Path, budget_s: float, count: int) -> dict[str, Any]:
    """Return how many greedy tokens of a session are those of the model in float64.

    The model reads all tokens at once in float64, so each choice follows the same tokens. A choice is open if the two
    largest logits in float64 differ by less than twice the error that plans may have: at least twice that of the model
    in its own types, if it may round its data, and twice that of states in 16 bits.
    """
    executable = korch.load(_session_artifact(state, step, folder, budget_s))
    if not isinstance(executable, StatefulExecutable):
        raise TypeError("the model has no states")
    prompt = Step(step.name, step.dtype, 0, PROMPT).inputs()["input_ids"][0].tolist()
    found = generate(executable, prompt, count).tokens
    model = build_decoder(step.name, step.dtype, batch=1)
    rows = PROMPT + count - 1
    graph = fission(load_model(model, {"seq": (rows,), "past": (0,), "past + seq": (rows,)}))
    inputs = Step(step.name, step.dtype, 0, rows).inputs()
    inputs["input_ids"] = np.array([prompt + list(found[:-1])])
    logits = reference.run(graph, inputs)["logits"][0, PROMPT - 1 :]
    second, first = np.partition(logits, -2, -1)[:, -2:].T
    error = max(least_tolerance(graph), FACTOR * executable.described.kept_error) * np.abs(logits).max()
    if step.dtype.endswith(ROUNDED):
        rounded = reference.run(graph, inputs, exact=False)["logits"][0, PROMPT - 1 :]
        error = max(error, FACTOR * np.abs(rounded - logits).max())
    is_open, is_equal = first - second < 2 * error, logits.argmax(-1) == np.array(found)
    return {
        "tokens": count,
        "equal": int(is_equal.sum()),
        "open": int(is_open.sum()),
        "wrong": int((~is_equal & ~is_open).sum()),
    }


def _reading(size: int, folder: Path, budget_s: float) -> RunnerSpec:
    """Return the engine that reads as many bytes."""
    count = math.ceil(size / (4 * ROW))
    read = folder / f"read-{count}.korch"
    if not read.exists():
        with tempfile.TemporaryDirectory() as temporary:
            save(_sum(count), Path(temporary) / "sum.onnx")
            _optimize(Path(temporary) / "sum.onnx", read, min(budget_s, READ_BUDGET_S))
    return RunnerSpec("benchmarks.decode:READ", read, "read")


def _runners(path: Path) -> Iterator[RunnerSpec]:
    for name in ENGINES:
        if get_peer(name).is_available() is None:
            yield RunnerSpec(name, path.with_suffix(".korch") if name == "korch" else path)


def _sum(count: int) -> onnx.ModelProto:
    """Return a model that adds up each row of `count` rows."""
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [count, ROW]), ("y", [count, 1]))
    )
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"])
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph = helper.make_graph([node], "sum", [x], [y], [axes])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _state_text(state: str) -> str:
    return "" if state == "float32" else f", states in {state}"


def _optimize(model: Path, artifact: Path, budget_s: float, *flags: str) -> None:
    """Search a plan in a process of its own, so that its memory is free when engines are timed."""
    command = [sys.executable, "-m", "korch.cli", "optimize", str(model), "-o", str(artifact)]
    subprocess.run([*command, "--budget", str(budget_s), *flags], check=True)


def _figures(found: Comparison, size: int) -> dict[str, Any]:
    times = {row.name: np.array(row.times_ns) for row in found.rows}
    own = times["korch"]
    others = {name: ns for name, ns in times.items() if name != "korch"}
    return {
        "ms": {row.name: row.median_ms for row in found.rows},
        "speedup": {name: _percentiles(ns / own) for name, ns in others.items()},
        "gb_per_s": {name: size / float(np.median(ns)) for name, ns in times.items()},
        "max_error": {row.name: row.max_error if np.isfinite(row.max_error) else None for row in found.rows},
        "left_out": dict(found.left_out),
    }


def _percentiles(quotients: Array) -> Sequence[float]:
    return [float(q) for q in np.percentile(quotients, (10, 50, 90))]


def _text(row: dict[str, Any]) -> str:
    quotients = (f"{name} {q[1]:.2f} ({q[0]:.2f} to {q[2]:.2f})" for name, q in row["speedup"].items())
    return f"{row['ms']['korch']:.2f} ms, times of others divided by it: {', '.join(quotients)}"


_say = partial(print, file=sys.stderr, flush=True)

if __name__ == "__main__":
    raise SystemExit(main())
