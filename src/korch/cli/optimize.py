"""`korch optimize`, and the commands that run up to one stage and print its result."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from korch.cli.arrays import writing
from korch.cli.flags import options_of
from korch.cli.shapes import parse_bindings, parse_shapes
from korch.errors import OptionError
from korch.options import Options
from korch.system.deadline import Deadline
from korch.system.files import check_output, open_file

if TYPE_CHECKING:
    from korch.binary_program.presolve import Describe
    from korch.binary_program.problem import Problem
    from korch.limits import SearchLimits
    from korch.pipeline import PipelineStage, Run
    from korch.pipeline.results import StageResults

    _Program: TypeAlias = "tuple[Problem, Sequence[str] | None, Describe | None]"
    """The program of a block, the names of its candidates, and a function that names its values."""


def optimize(parsed: argparse.Namespace) -> int:
    """Build an artifact from a model; with `--stop-after`, only run the stages up to the named one."""
    from korch.api import build
    from korch.records import plain, to_json
    from korch.report.explain import describe
    from korch.report.progress import Bar, Update

    if parsed.dry_run:
        return _dry_run(parsed)
    if parsed.stop_after is not None:
        return _stop_after(parsed)
    if parsed.output is None:
        raise OptionError("there is no name for the artifact", where="option --output", expected="-o OUT.korch")
    read = [parsed.model, *options_of(parsed).files]
    if os.path.exists(parsed.output):  # noqa: PTH110 - of any name
        from korch.frontend.tensors import data_files

        read += data_files(parsed.model)
    check_output(parsed.output, "--output", read)
    if parsed.ledger is not None and os.path.realpath(parsed.ledger) == os.path.realpath(parsed.output):
        raise OptionError(f"{parsed.ledger} is the artifact, too", where="option --ledger", expected="another file")
    if options_of(parsed).is_recorded:
        return _build_apart(parsed)
    with Bar(parsed.budget_s, parsed.begun_s, show=parsed.progress) as bar:
        executable = build(
            parsed.model,
            options_of(parsed),
            parse_bindings(parsed.shape),
            bar.tell,
            Deadline.after(parsed.budget_s, parsed.begun_s),
            partial(_print_result, parsed.print_after) if parsed.print_after else None,
        )
        bar.tell(Update("save", str(parsed.output)))
        executable.save(parsed.output)
    if parsed.json:
        print(to_json({"artifact": str(parsed.output), **plain(executable.report)}), end="")
    else:
        print(describe(str(parsed.output), executable.report))
    return 0


def _build_apart(parsed: argparse.Namespace) -> int:
    """Build an artifact for a device that is not here, from the records of its kernels."""
    from korch.cuda.runtime.record import archive_of
    from korch.pipeline.prepare import build_apart
    from korch.records import plain, to_json
    from korch.report.explain import describe
    from korch.report.progress import Bar

    with Bar(parsed.budget_s, parsed.begun_s, show=parsed.progress) as bar:
        program = build_apart(parsed.model, options_of(parsed), parse_shapes(parsed.shape), bar.tell)
    archive_of(program).write(parsed.output)
    found = {"artifact": str(parsed.output), **plain(program.report)}
    print(to_json(found) if parsed.json else describe(str(parsed.output), program.report), end="\n" * (not parsed.json))
    return 0


def _dry_run(parsed: argparse.Namespace) -> int:
    from korch.pipeline import plan_model
    from korch.report.progress import Bar

    with Bar() as bar:
        found = plan_model(parsed.model, options_of(parsed), parse_shapes(parsed.shape), bar.tell)
    print(json.dumps(found.to_json(), indent=1) if parsed.json else found.to_text())
    return 1 if found.failures else 0


def check(parsed: argparse.Namespace) -> int:
    """Print what an optimization would do, for each binding."""
    from korch.api import check_bindings
    from korch.host.forecast import forecasts
    from korch.records import to_json

    bindings = parse_bindings(parsed.shape)
    check_bindings(bindings)
    found = forecasts(parsed.model, options_of(parsed), bindings, parsed.begun_s)
    if parsed.json:
        print(to_json(found[0] if len(found) == 1 else {"bindings": found}), end="")
    else:
        print("\n\n".join(one.to_text() for one in found))
    return 0


def print_stage(parsed: argparse.Namespace) -> int:
    """Run the stages up to `parsed.stage`, and print the result of this stage."""
    options = options_of(parsed)
    if parsed.stage == "orchestrate" and parsed.model.suffix in (".txt", ".json"):
        text = _read_text(parsed.model)
        if not text.startswith(("graph(", "model(")):
            _solve(_programs(parsed.model, text), options.search)
            return 0
    if parsed.onnx is None:
        _run_stages(parsed, options, parsed.stage, [parsed.stage])
        return 0
    if parsed.stage == "fission":  # the other one writes a folder, which may exist
        check_output(parsed.onnx, "--onnx", [parsed.model])
    _write_onnx(_run_stages(parsed, options, parsed.stage, []), parsed.onnx)
    return 0


def _programs(path: Path, text: str) -> Sequence[_Program]:
    """Return the program of each block of a file."""
    from korch.binary_program.candidate_file import parse_candidates
    from korch.binary_program.text import parse_problems

    if path.suffix == ".txt":
        return [(problem, None, None) for problem in parse_problems(text)]
    programs: list[_Program] = []
    for file in parse_candidates(text, str(path)):
        problem, names = file.to_problem()
        programs.append((problem, [row.id for row in file.candidates], names.__getitem__))
    return programs


def _solve(programs: Sequence[_Program], limits: SearchLimits) -> None:
    """Print the plan of each program."""
    from korch.binary_program.solve import solve
    from korch.binary_program.text import format_plan

    for b, (problem, names, describe) in enumerate(programs):
        print(f"block {b}\n" if len(programs) > 1 else "", end="")
        plan = solve(problem, seconds=limits.solver_seconds, limits=limits, describe=describe)
        print(format_plan(plan, names), end="")


def _write_onnx(results: StageResults, path: Path) -> None:
    """Write the candidates if there are any, else the primitives, as ONNX."""
    from korch.primitive.as_onnx import OnnxNodes
    from korch.report.stage_onnx import save_candidates, save_model
    from korch.runtime.text import counted

    with writing(path, "option --onnx"):
        if offered := results.get("candidates"):
            models, candidates = save_candidates(offered.tasks, offered.ledger.cost_ns, path)
            print(f"{path}: {counted(candidates, 'candidate')} for {counted(models, 'model')}")
        else:
            graph = results["fission"].graph
            save_model(OnnxNodes(graph, str(path)).model(), path)
            print(f"{path}: {counted(len(graph.primitives), 'primitive')}")


def _stop_after(parsed: argparse.Namespace) -> int:
    _run_stages(parsed, options_of(parsed), parsed.stop_after, parsed.print_after)
    return 0


def _run_stages(parsed: argparse.Namespace, options: Options, last: str, printed: Sequence[str]) -> StageResults:
    """Run the stages up to `last`, from a model or from the text of a graph; print the results of `printed`."""
    from korch.pipeline import Run, run_until
    from korch.pipeline.texts import read_graph_text
    from korch.report.progress import Bar

    with Bar(options.budget_s) as bar:
        run = Run(options, parse_shapes(parsed.shape), bar.tell, parsed.model)
        first = "frontend"
        if parsed.model.suffix == ".txt":
            if last in ("frontend", "fission"):
                raise OptionError(f"{parsed.model} is the text of a graph", f"korch {last}", "an ONNX model")
            first = read_graph_text(run.results, _read_text(parsed.model))
            if last == "saturate" and first != last:
                raise OptionError(
                    "the text already contains alternatives", str(parsed.model), "a text that korch fission printed"
                )
            if last != "saturate":
                run.options = replace(options, ablation=replace(options.ablation, rules="none"))
        skip = () if "reference" in (last, *printed) or last == "build" else ("reference",)
        with run.resources:
            run_until(run, last, first=first, skip=skip, watch=partial(_print_result, printed))
        return run.results


def _print_result(printed: Sequence[str], stage: PipelineStage, run: Run) -> None:
    if stage.name in printed:
        print(stage.text(run.results), end="")


def _read_text(path: Path) -> str:
    try:
        with open_file(path) as stream:
            return stream.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"it can't be read ({error})", str(path), "the printed result of a stage") from error
