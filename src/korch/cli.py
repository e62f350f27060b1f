"""The command line: `korch optimize`, `run`, `bench`, `explain`, `doctor`.

Exit codes: 0 done, 1 a clear error, 2 wrong usage. What a program reads goes to stdout, what a
person watches to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from korch import __version__
from korch.errors import InputError, KorchError, OptionError
from korch.options import Options
from korch.primitive.types import DType

PEERS = "onnxruntime,openvino"
RENAMED = {"budget_s": "budget"}
"""Option fields whose flag leaves out the unit, which the help names."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if parsed.verbose else logging.WARNING,
        format="korch: %(message)s", stream=sys.stderr,
    )  # fmt: skip
    try:
        code: int = parsed.command(parsed)
    except KorchError as error:
        print(f"korch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("korch: interrupted; what was measured is kept, the same command goes on from there",
              file=sys.stderr)  # fmt: skip
        return 130
    except BrokenPipeError:
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="korch",
        description="Run a model with the provably cheapest set of kernels for this machine.",
    )
    parser.add_argument("--version", action="version", version=f"korch {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log what is done")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    optimize = commands.add_parser("optimize", help="build an artifact from an ONNX model")
    optimize.add_argument("model", type=Path, metavar="MODEL.onnx")
    optimize.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.korch")
    shape_help = "the shape of an input with unknown dimensions; repeatable"
    optimize.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224",
                          help=shape_help)  # fmt: skip
    optimize.add_argument("--json", action="store_true", help="print a report as JSON")
    _add_options(optimize)
    optimize.set_defaults(command=_optimize)

    run = commands.add_parser("run", help="run an artifact")
    run.add_argument("artifact", type=Path, metavar="OUT.korch")
    run.add_argument("--input", action="append", default=[], metavar="NAME=x.npy")
    run.add_argument("--random", action="store_true", help="use seeded random inputs")
    run.add_argument("--output", type=Path, metavar="out.npz", help="where to write the outputs")
    run.add_argument("--repeat", type=int, default=0, metavar="N", help="time N runs")
    run.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    run.set_defaults(command=_run)

    bench = commands.add_parser("bench", help="compare with other engines, interleaved")
    bench.add_argument("subject", type=Path, metavar="MODEL.onnx|OUT.korch")
    names = "onnxruntime, openvino, inductor, eager; separated by commas"
    bench.add_argument("--against", default=PEERS, metavar="NAMES", help=names)
    bench.add_argument("--model", type=Path, metavar="MODEL.onnx",
                       help="the model that the others run, for an artifact")  # fmt: skip
    bench.add_argument("--rounds", type=int, default=15, metavar="N")
    bench.add_argument("--json", action="store_true", help="print the rows as JSON")
    bench.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224")
    _add_options(bench)
    bench.set_defaults(command=_bench)

    explain = commands.add_parser("explain", help="show the kernels of an artifact, and why")
    explain.add_argument("artifact", type=Path, metavar="OUT.korch")
    explain.add_argument("--json", action="store_true", help="print the plan as JSON")
    explain.set_defaults(command=_explain)

    doctor = commands.add_parser("doctor", help="check compiler, libraries and cache")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field of `Options`."""
    group = parser.add_argument_group("options")
    hints = typing.get_type_hints(Options)
    for field in dataclasses.fields(Options):
        flag = "--" + RENAMED.get(field.name, field.name).replace("_", "-")
        text = field.metadata["help"]
        if hints[field.name] is bool:
            group.add_argument(flag, dest=field.name, action="store_true", help=text)
            continue
        default = (
            field.default if field.default is not dataclasses.MISSING
            else "see below" if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )  # fmt: skip
        kind, choices = _flag_type(hints[field.name])
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(flag, dest=field.name, type=kind, choices=choices, default=default,
                           metavar=None if choices else kind.__name__.upper(),
                           help=text + shown)  # fmt: skip


def _flag_type(hint: Any) -> tuple[type, Sequence[Any] | None]:
    if typing.get_origin(hint) is typing.Literal:
        values = typing.get_args(hint)
        return type(values[0]), values
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return hint, None


def _options(parsed: argparse.Namespace) -> Options:
    return Options(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(Options)})


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return shapes by input name from texts like `image=1x3x224x224`.

    Raises:
        OptionError: a text has another form.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        parts = sizes.split("x") if sizes else []
        if not equals or not name or not all(part.isdigit() for part in parts):
            raise OptionError(f"can't read {text!r}", where="option --shape",
                              expected="NAME=1x3x224x224")  # fmt: skip
        shapes[name] = tuple(map(int, parts))
    return shapes


def _optimize(parsed: argparse.Namespace) -> int:
    from korch.pipeline import optimize_model
    from korch.report.explain import summary
    from korch.report.progress import Bar

    if not parsed.output.absolute().parent.is_dir():
        raise OptionError(f"the folder of {parsed.output} does not exist", where="option --output",
                          hint="Create it first")  # fmt: skip
    with Bar() as bar:
        executable = optimize_model(
            parsed.model, _options(parsed), parse_shapes(parsed.shape), bar.tell
        )
        executable.save(parsed.output)
    report = {"artifact": str(parsed.output), **executable.report}
    if parsed.json:
        print(json.dumps(report, indent=1, default=str))
    else:
        print(summary(report))
    return 0


def _run(parsed: argparse.Namespace) -> int:
    from korch.runtime.executable import load

    executable = load(parsed.artifact)
    feeds = _feeds(parsed, executable)
    outputs = executable.run(None, feeds)
    names = [tensor.name for tensor in executable.get_outputs()]
    if parsed.output is not None:
        named: dict[str, Any] = dict(zip(names, outputs, strict=True))
        try:
            np.savez(parsed.output, **named)
        except OSError as error:
            raise OptionError(f"{parsed.output} can't be written: {error.strerror}",
                              where="option --output") from error  # fmt: skip
    for name, array in zip(names, outputs, strict=True):
        print(f"{name}: {DType.of(array.dtype).value}{list(array.shape)}")
    if parsed.repeat > 0:
        arrays = [feeds[tensor.name] for tensor in executable.get_inputs()]
        times_ns = np.array(executable.time(arrays, parsed.repeat).run_ns)
        low, middle, high = np.percentile(times_ns / 1e6, [10, 50, 90])
        print(f"{parsed.repeat} runs: median {middle:.3f} ms, p10 {low:.3f}, p90 {high:.3f}")
    return 0


def _feeds(parsed: argparse.Namespace, executable: Any) -> dict[str, Any]:
    from korch.report.peers.inputs import random_arrays

    feeds: dict[str, Any] = {}
    if parsed.random:
        feeds = random_arrays(
            {t.name: (tuple(t.shape), t.dtype) for t in executable.get_inputs()}, parsed.seed
        )
    for text in parsed.input:
        name, equals, file = text.partition("=")
        if not equals:
            raise OptionError(f"can't read {text!r}", where="option --input",
                              expected="NAME=x.npy")  # fmt: skip
        try:
            feeds[name] = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{file} can't be read: {error}", where=f"input {name!r}",
                             expected="a .npy file") from error  # fmt: skip
    return feeds


def _bench(parsed: argparse.Namespace) -> int:
    from korch.report.bench import bench
    from korch.report.progress import Bar

    with Bar() as bar:
        comparison = bench(
            parsed.subject, [name for name in parsed.against.split(",") if name], parsed.model,
            parsed.rounds, _options(parsed), parse_shapes(parsed.shape), bar.tell,
        )  # fmt: skip
    if parsed.json:
        print(json.dumps(comparison.to_json(), indent=1))
    else:
        print(comparison.to_text())
    return 0


def _explain(parsed: argparse.Namespace) -> int:
    from korch.report.explain import explain
    from korch.runtime.executable import load

    executable = load(parsed.artifact)
    if parsed.json:
        print(executable.plan.to_json(), end="")
    else:
        print(explain(executable.plan, executable.report))
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from korch.report.doctor import examine

    text, is_well = examine()
    print(text)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
