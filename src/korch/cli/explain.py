"""`korch explain`, `unpack` and `doctor`: commands that show artifacts and the machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from korch.cli.arrays import writing
from korch.cli.run import profiled, watched_threads
from korch.cli.select import plan_at
from korch.cli.shapes import parse_shapes
from korch.errors import ArtifactError, KorchError, OptionError
from korch.system.files import check_output, open_file

if TYPE_CHECKING:
    from korch.report.compare import Row
    from korch.runtime.runnable import PlanExecutable, Runnable

PAGE_ROUNDS = 20
"""The number of runs for the timeline of the HTML page."""


def explain(parsed: argparse.Namespace) -> int:
    """Show the plan of an artifact."""
    from korch.loading import load

    for option, output in (("--html", parsed.html), ("--onnx", parsed.onnx)):
        if output is not None:
            read = (parsed.artifact, parsed.other, parsed.peers)
            check_output(output, option, [path for path in read if path is not None])
    if None not in (parsed.html, parsed.onnx) and os.path.realpath(parsed.html) == os.path.realpath(parsed.onnx):
        raise OptionError(f"{parsed.onnx} is the page, too", "option --onnx", "another file")
    executable = load(parsed.artifact)
    try:
        _show(parsed, executable)
    except KorchError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        named = [str(path) for path in (parsed.artifact, parsed.other) if path is not None]
        raise ArtifactError(
            f"its plan can't be read ({type(error).__name__}: {error})",
            " or ".join(named),
            expected="an artifact that `korch optimize` wrote",
            hint="Build the artifact again",
        ) from error
    return 0


def _show(parsed: argparse.Namespace, executable: Runnable) -> None:
    """Write the files and print the text that the flags of `korch explain` select."""
    from korch.loading import load
    from korch.records import plain, to_json
    from korch.report.explain import describe
    from korch.report.explain import explain as explanation_of
    from korch.report.kernel import kernel_text
    from korch.runtime.runnable import PlanExecutable

    def plan(of: Runnable, path: Path) -> PlanExecutable:
        return plan_at(of, parse_shapes(parsed.shape), path)

    if parsed.other is not None:
        _compare(parsed, plan(executable, parsed.artifact), plan(load(parsed.other), parsed.other))
        return
    is_one = isinstance(executable, PlanExecutable) or bool(parsed.shape)
    if parsed.onnx is not None:
        _write_plan_onnx(parsed, plan(executable, parsed.artifact))
    if parsed.html is not None:
        _write_page(parsed, plan(executable, parsed.artifact))
    if parsed.kernel is not None:
        one = plan(executable, parsed.artifact)
        print(kernel_text(one.plan, one.report, parsed.kernel, one.sources))
    elif parsed.json:
        record = plan(executable, parsed.artifact).plan.to_json() if is_one else ""
        print(record or to_json({"artifact": str(parsed.artifact), **plain(executable.report)}), end="")
    elif parsed.onnx is None and parsed.html is None:
        only = plan(executable, parsed.artifact) if is_one else None
        print(explanation_of(only.plan, only.report) if only else describe(str(parsed.artifact), executable.report))


def _compare(parsed: argparse.Namespace, first: PlanExecutable, second: PlanExecutable) -> None:
    """Print the differences of two plans."""
    from korch.report.diff import differences

    refused = {"--html": parsed.html, "--onnx": parsed.onnx, "--kernel": parsed.kernel, "--json": parsed.json or None}
    for option, value in refused.items():
        if value is not None:
            raise OptionError("it is not for two plans", f"option {option}", expected="one artifact")
    pair = (first.plan, first.report), (second.plan, second.report)
    print(differences(*pair))


def _write_plan_onnx(parsed: argparse.Namespace, executable: PlanExecutable) -> None:
    from korch.report.plan_onnx import plan_model
    from korch.report.stage_onnx import save_model
    from korch.runtime.executable import Executable
    from korch.runtime.text import counted

    if not isinstance(executable, Executable):
        raise OptionError(
            "only a plan for the CPU is written as ONNX", str(parsed.artifact), expected="an artifact for the CPU"
        )
    model = plan_model(executable.plan, executable.artifact.weights.array)
    with writing(parsed.onnx, "option --onnx"):
        save_model(model, parsed.onnx)
    _tell(parsed, f"{parsed.onnx}: {counted(len(model.functions), 'kernel')} as functions")


def _write_page(parsed: argparse.Namespace, executable: PlanExecutable) -> None:
    from korch.report.compare import read_rows
    from korch.report.page import page, page_data
    from korch.runtime.artifact import write_file
    from korch.runtime.executable import Executable

    run_ns = threads = None
    if parsed.run and isinstance(executable, Executable):
        threads, _ = watched_threads(parsed, executable, PAGE_ROUNDS, 0)
        run_ns = [kernel.median_ns for kernel in profiled(executable, PAGE_ROUNDS, 0).kernels]
    peers: tuple[Row, ...] = ()
    if parsed.peers is not None:
        try:
            with open_file(parsed.peers) as stream:
                peers = read_rows(json.load(stream)["rows"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise OptionError(
                f"{parsed.peers} is no comparison ({error})",
                "option --peers",
                expected="what `korch bench --json` prints",
            ) from error
    text = page(page_data(executable.plan, executable.report, executable.sources, run_ns, peers, threads))
    write_file(parsed.html, lambda stream: stream.write(text.encode()))
    _tell(parsed, f"{parsed.html}: {len(text) / 1e6:.1f} MB, open it in a browser")


def _tell(parsed: argparse.Namespace, text: str) -> None:
    """Print what was written; not where JSON is printed."""
    print(text, file=sys.stderr if parsed.json else sys.stdout)


def unpack(parsed: argparse.Namespace) -> int:
    """Write the files that a C program needs to run an artifact."""
    from korch.runtime.unpack import unpack as write_folder

    print(write_folder(parsed.artifact, parsed.folder).to_text())
    return 0


def doctor(parsed: argparse.Namespace) -> int:
    """Check the compiler, the libraries and the cache folder."""
    from korch.report.doctor import examine

    text, is_well = examine()
    print(text)
    return 0 if is_well else 1
