"""The parser of the command line; each function adds one command or several similar commands."""

import argparse
from pathlib import Path
from typing import TypeAlias

from korch import __version__
from korch.cli import explain, optimize, run
from korch.cli.database import add_database
from korch.cli.flags import add_options
from korch.cli.generate import add_generate
from korch.cli.prepare import add_prepare
from korch.report.progress import SHOWS, STAGES

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The type that `argparse.ArgumentParser.add_subparsers` returns."""

PEERS = "onnxruntime,openvino"

SHAPE_HELP = (
    "the shape of an input, or the size of a dimension by its name; repeatable. Several, "
    "separated by commas, give one artifact with a plan for each; LOW..HIGH gives one for all sizes of a range"
)

PROGRESS_HELP = (
    "show progress on stderr. auto: one line, on a terminal only; lines: a line every ten seconds; "
    "json: a JSON line every second, with the stage, the best plan so far, what is expected, and the seconds left"
)

PLAN_HELP = "for several plans: the shape of an input, or the size of a dimension by its name; repeatable"


ARTIFACT_HELP = "what `korch optimize` has written"

_SATURATE = ("target", "budget_s", "strict", "precision", "cache_folder")
_CANDIDATES = ("target", "threads", *_SATURATE[1:])
_ORCHESTRATE = (*_CANDIDATES, "tolerance", "measure")

PRINTED = {
    "fission": ("print a model's primitives", ()),
    "saturate": ("print a model's primitives with the alternatives that equivalences add", _SATURATE),
    "candidates": ("print the groups of primitives and the kernels that are offered for them", _CANDIDATES),
    "orchestrate": ("print the program with its costs, and the plan", _ORCHESTRATE),
    "lower": ("print the tile programs of the plan's kernels", _ORCHESTRATE),
}
"""The commands that print the result of a stage: the help text of each, and its options."""

WRITTEN = {
    "fission": ("OUT.onnx", "write the primitives as an ONNX model with the same results, and do not print them"),
    "candidates": ("FOLDER", "write an ONNX model for each group and a list of the candidates with their costs"),
}
"""The commands whose result can be written as ONNX: what is written."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="korch", description="Search for a fast set of kernels to run a model on this machine."
    )
    parser.add_argument("--version", action="version", version=f"korch {__version__}")
    parser.add_argument("--verbose", action="store_true", help="print log messages to stderr")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_optimize(commands)
    _add_check(commands)
    _add_run(commands)
    add_generate(commands)
    _add_bench(commands)
    _add_explain(commands)
    _add_profile(commands)
    _add_unpack(commands)
    _add_stages(commands)
    add_prepare(commands, SHAPE_HELP)
    add_database(commands)
    commands.add_parser("doctor", help="check compiler, libraries and cache").set_defaults(command=explain.doctor)
    for each in commands.choices.values():
        each.set_defaults(parser=each)
    return parser


def _add_optimize(commands: Commands) -> None:
    parser = commands.add_parser("optimize", help="build an artifact from an ONNX model")
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.korch", help="the artifact to write")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="for a CUDA target: search with bounds as costs, compile the kernels and print them; no device is needed "
        "and nothing is written",
    )
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=SHAPE_HELP)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    stages = STAGES[:-1]  # "save" is not a stage of the pipeline
    parser.add_argument("--stop-after", choices=stages, metavar="STAGE", help=f"end after a stage: {', '.join(stages)}")
    parser.add_argument(
        "--print-after", choices=stages, action="append", default=[], metavar="STAGE", help="print a stage's result"
    )
    parser.add_argument("--progress", choices=SHOWS, default="auto", help=PROGRESS_HELP)
    add_options(parser)
    parser.set_defaults(command=optimize.optimize)


def _add_check(commands: Commands) -> None:
    parser = commands.add_parser("check", help="say what an optimization would do: what is native, why, and its budget")
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=SHAPE_HELP)
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    add_options(parser, ("threads", "strict", "cache_folder"))
    parser.set_defaults(command=optimize.check)


def _add_run(commands: Commands) -> None:
    parser = commands.add_parser("run", help="run an artifact")
    parser.add_argument("artifact", type=Path, metavar="OUT.korch", help=ARTIFACT_HELP)
    parser.add_argument(
        "--input", action="append", default=[], metavar="NAME=x.npy", help="an input from a file; repeatable"
    )
    parser.add_argument("--random", action="store_true", help="use seeded random inputs")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=PLAN_HELP)
    parser.add_argument("--output", type=Path, metavar="out.npz", help="where to write the outputs")
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="time N runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.set_defaults(command=run.run)


def _add_bench(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="compare with other engines in interleaved runs")
    subject = "a model, which is optimized first, or an artifact"
    parser.add_argument("subject", type=Path, metavar="MODEL.onnx|OUT.korch", help=subject)
    names = (
        "onnxruntime, openvino, or package.module:OBJECT for a PyTorch module as eager:package.module:OBJECT or "
        "inductor:package.module:OBJECT, or for an engine of your own; separated by commas"
    )
    parser.add_argument("--against", default=PEERS, metavar="NAMES", help=names)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="MODEL.onnx",
        help="the model that the other engines run, if the subject is an artifact",
    )
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="runs of each engine, in turn")
    rest = "time single runs after a rest, as where requests are few; without it, runs follow each other"
    parser.add_argument("--rest", type=float, default=0.0, metavar="MILLISECONDS", help=rest)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=SHAPE_HELP)
    add_options(parser)
    parser.set_defaults(command=run.bench)


def _add_explain(commands: Commands) -> None:
    parser = commands.add_parser("explain", help="show the kernels of an artifact, and why they were chosen")
    parser.add_argument("artifact", type=Path, metavar="OUT.korch", help=ARTIFACT_HELP)
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER.korch", help="compare with this plan")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=PLAN_HELP)
    parser.add_argument("--kernel", type=int, metavar="NUMBER", help="show one kernel, its time and its rivals")
    parser.add_argument(
        "--html", type=Path, metavar="report.html", help="write a page with graph, roofline, timeline and sources"
    )
    parser.add_argument(
        "--peers", type=Path, metavar="bench.json", help="show on the page what `korch bench --json` printed"
    )
    parser.add_argument(
        "--onnx", type=Path, metavar="plan.onnx", help="write the plan as an ONNX model with one function per kernel"
    )
    parser.add_argument(
        "--run",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the plan a few times for the page's timeline",
    )
    parser.set_defaults(command=explain.explain)


def _add_profile(commands: Commands) -> None:
    parser = commands.add_parser("profile", help="time the kernels of an artifact in complete runs")
    parser.add_argument("artifact", type=Path, metavar="OUT.korch", help=ARTIFACT_HELP)
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="runs of the plan")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=PLAN_HELP)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.add_argument("--json", action="store_true", help="print all kernels as JSON")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="trace.json",
        help="write one run as a trace for Perfetto or Chrome, with a row for each thread",
    )
    parser.add_argument("--threads", action="store_true", help="show how evenly each kernel uses the threads")
    parser.set_defaults(command=run.profile)


def _add_unpack(commands: Commands) -> None:
    parser = commands.add_parser("unpack", help="write the files that a C program needs to run an artifact")
    parser.add_argument("artifact", type=Path, metavar="OUT.korch", help=ARTIFACT_HELP)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="an empty or new folder")
    parser.set_defaults(command=explain.unpack)


def _add_stages(commands: Commands) -> None:
    for name, (text, options) in PRINTED.items():
        parser = commands.add_parser(name, help=text)
        parser.add_argument(
            "model", type=Path, metavar="MODEL.onnx|GRAPH.txt", help="a model, or the printed result of a stage before"
        )
        parser.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=SHAPE_HELP)
        if options:
            add_options(parser, options)
        if name in WRITTEN:
            flags = ("-o", "--onnx") if name == "fission" else ("--onnx",)
            parser.add_argument(*flags, type=Path, metavar=WRITTEN[name][0], help=WRITTEN[name][1])
        parser.set_defaults(command=optimize.print_stage, stage=name, onnx=None)
