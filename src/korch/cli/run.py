"""`korch run`, `bench` and `profile`: commands that run an artifact."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from korch.cli.arrays import read_feeds, write_arrays
from korch.cli.flags import options_of
from korch.cli.select import plan_at
from korch.cli.shapes import parse_bindings, parse_shapes
from korch.errors import CompileError, MeasureError, OptionError
from korch.primitive.types import DType
from korch.ranges.binding import static
from korch.system.files import check_output

if TYPE_CHECKING:
    from korch.report.profile import Profile
    from korch.report.threads import Threads
    from korch.runtime.executable import Executable


def run(parsed: argparse.Namespace) -> int:
    """Run an artifact on given or random inputs."""
    from korch.loading import load

    if parsed.shape and not parsed.random:
        raise OptionError("it is for random inputs only", "option --shape", hint="Add --random, or leave it out")
    if parsed.repeat < 0:
        raise OptionError(f"the value {parsed.repeat} is too small", "option --repeat", "at least 0")
    if parsed.output is not None:
        files = [Path(text[i:]) for text in parsed.input for i in range(1, len(text)) if text[i - 1] == "="]
        check_output(parsed.output, "--output", [parsed.artifact, *files])
    executable = load(parsed.artifact)
    feeds = read_feeds(parsed, executable)
    outputs = executable.run(None, feeds)
    names = [tensor.name for tensor in executable.get_outputs()]
    if parsed.output is not None:
        write_arrays(parsed.output, dict(zip(names, outputs, strict=True)))
    for name, array in zip(names, outputs, strict=True):
        print(f"{name}: {DType.of(array.dtype).value}{list(array.shape)}")
    if parsed.repeat > 0:
        arrays = [feeds[tensor.name] for tensor in executable.get_inputs()]
        times_ns = np.array(executable.time(arrays, parsed.repeat).run_ns)
        low, middle, high = np.percentile(times_ns / 1e6, [10, 50, 90])
        print(f"{parsed.repeat} runs: median {middle:.3f} ms, p10 {low:.3f}, p90 {high:.3f}")
    return 0


def bench(parsed: argparse.Namespace) -> int:
    """Compare a model or an artifact with other engines."""
    from korch.cli.bench import bench as compared
    from korch.cli.bench import bindings_of
    from korch.cli.select import shapes_text
    from korch.report.progress import Bar

    engines = [name for name in parsed.against.split(",") if name]
    found = []
    with Bar() as bar:
        for shapes in map(static, bindings_of(parsed.subject, parse_bindings(parsed.shape))):
            options = options_of(parsed)
            comparison = compared(
                parsed.subject,
                engines,
                parsed.model,
                parsed.rounds,
                options,
                shapes,
                rest_ms=parsed.rest,
                tell=bar.tell,
            )
            found.append((shapes, comparison))
    if len(found) == 1:
        comparison = found[0][1]
        print(json.dumps(comparison.to_json(), indent=1) if parsed.json else comparison.to_text())
    elif parsed.json:
        rows = [{"shapes": shapes, **one.to_json()} for shapes, one in found]
        print(json.dumps({"bindings": rows}, indent=1))
    else:
        print("\n\n".join(f"{shapes_text(shapes)}\n{one.to_text()}" for shapes, one in found))
    return int(all(len(one.rows) == 1 and one.left_out for _, one in found))


def profile(parsed: argparse.Namespace) -> int:
    """Time the kernels of an artifact in complete runs."""
    from korch.loading import load
    from korch.records import to_json
    from korch.report.trace import trace
    from korch.runtime.artifact import write_file
    from korch.runtime.executable import Executable

    if parsed.rounds < 1:
        raise OptionError(f"the value {parsed.rounds} is too small", where="option --rounds", expected="at least 1")
    executable = plan_at(load(parsed.artifact), parse_shapes(parsed.shape), parsed.artifact)
    if not isinstance(executable, Executable):
        raise OptionError("it is for a CUDA device", where=str(parsed.artifact), expected="an artifact for the CPU")
    if parsed.trace is not None:
        check_output(parsed.trace, "--trace", [parsed.artifact])
    found = profiled(executable, parsed.rounds, parsed.seed)
    threads, reason = None, ""
    if parsed.threads or parsed.trace is not None:
        threads, reason = watched_threads(parsed, executable, parsed.rounds, parsed.seed)
        found = found if threads is None else replace(found, loads=threads.loads())
    if parsed.trace is not None:
        text = json.dumps(trace(executable.plan, found, threads, reason))
        write_file(parsed.trace, lambda stream: stream.write(text.encode()))
    print(to_json(found) if parsed.json else found.to_text())
    return 0


def watched_threads(
    parsed: argparse.Namespace, executable: Executable, rounds: int, seed: int
) -> tuple[Threads | None, str]:
    """Return the activity of threads in runs and ""; or None and the reason why it is not known."""
    from korch.report.threads import watch_threads

    if executable.is_one_of_several:
        return None, "they can be watched for an artifact of one plan only"
    try:
        return watch_threads(parsed.artifact, executable.plan.threads, rounds, seed), ""
    except (CompileError, MeasureError) as error:
        print(f"korch: threads are not shown: {error}", file=sys.stderr)
        return None, str(error)


def profiled(executable: Executable, rounds: int, seed: int) -> Profile:
    """Return the profile of an executable on random inputs."""
    from korch.report.profile import profile as profile_of
    from korch.runtime.runnable import random_feeds

    return profile_of(executable, list(random_feeds(executable.get_inputs(), seed).values()), rounds)
