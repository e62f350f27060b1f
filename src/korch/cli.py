"""The command line: `korch optimize`, `run`, `bench`, `explain`, `profile`, `unpack`, `doctor`.

Exit codes: 0 done, 1 a clear error, 2 wrong usage. What a program reads goes to stdout, what a
person watches to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import types
import typing
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

import numpy as np

from korch import __version__
from korch.deadline import Deadline
from korch.errors import ArtifactError, InputError, KorchError, OptionError
from korch.files import check_output, open_file
from korch.options import MOVED, Options, flagged_fields, moved_option
from korch.primitive.types import DType

logger = logging.getLogger("korch.cli")

PEERS = "onnxruntime,openvino"
LARGEST_PROTOBUF = 1 << 30
"""Models of more bytes are written with their weights in a file beside them."""

PAGE_ROUNDS = 20
"""Runs for the timeline of a page."""

RENAMED = {"budget_s": "budget"}
"""Option fields whose flag leaves out the unit, which the help names."""


_SIZE = re.compile("[0-9]{1,18}").fullmatch
"""Of a dimension. Python takes other characters for digits, too, and longer numbers for none."""

_STAGES = {
    "fission": "print a model's primitives",
    "saturate": "print a model's primitives with the alternatives that equivalences add",
    "candidates": "print the groups of primitives that may become kernels",
}
"""Commands that stop after a stage and print what it gives, for people and bug reports."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # rather a "?" than no answer
            stream.reconfigure(errors="replace")
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    parsed.begun_s = time.monotonic() - (_age_s() if arguments is None else 0.0)
    logging.basicConfig(
        level=logging.DEBUG if parsed.verbose else logging.WARNING, format="korch: %(message)s", stream=sys.stderr
    )
    try:
        _refuse_unknown(parser, unknown)
        with _ended_by_signal():
            code: int = parsed.command(parsed)
        sys.stdout.flush()
    except KorchError as error:
        print("korch: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("korch: interrupted; what was measured is kept, the same command goes on from there", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a name that is too long, a full disk behind stdout
        logger.debug("the command ends", exc_info=True)
        where = f"{error.filename}: " if error.filename else ""
        print(f"korch: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    return code


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Refuse arguments that the command does not have; name the replacement of removed options."""
    for text in unknown:
        name = text.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if text.startswith("--") and name in MOVED:
            raise moved_option(name, f"option {text.partition('=')[0]}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let SIGTERM end the command as an error would, so that no process that it started runs on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="korch", description="Search for the cheapest set of kernels to run a model on this machine."
    )
    parser.add_argument("--version", action="version", version=f"korch {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log what is done")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    optimize = commands.add_parser("optimize", help="build an artifact from an ONNX model")
    optimize.add_argument("model", type=Path, metavar="MODEL.onnx")
    optimize.add_argument("-o", "--output", type=Path, metavar="OUT.korch")
    optimize.add_argument(
        "--dry-run",
        action="store_true",
        help="for a CUDA target: plan with bounds for costs, compile the "
        "kernels, print them; no device is needed and nothing is written",
    )
    shape_help = (
        "the shape of an input, or the size of a dimension by its name; repeatable. Several, "
        "separated by commas, give one artifact with a plan for each"
    )
    optimize.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=shape_help)
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
    names = (
        "onnxruntime, openvino, inductor, eager, iree, tvm (untuned) or tvm:2000 (tuned with "
        "2000 trials); separated by commas"
    )
    bench.add_argument("--against", default=PEERS, metavar="NAMES", help=names)
    bench.add_argument(
        "--model", type=Path, metavar="MODEL.onnx", help="the model that the others run, for an artifact"
    )
    bench.add_argument("--rounds", type=int, default=15, metavar="N")
    bench.add_argument("--json", action="store_true", help="print the rows as JSON")
    bench.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224")
    _add_options(bench)
    bench.set_defaults(command=_bench)

    explain = commands.add_parser("explain", help="show the kernels of an artifact, and why")
    explain.add_argument("artifact", type=Path, metavar="OUT.korch")
    explain.add_argument("other", type=Path, nargs="?", metavar="OTHER.korch", help="show what differs in this plan")
    explain.add_argument("--json", action="store_true", help="print the plan as JSON")
    explain.add_argument(
        "--kernel", type=int, metavar="NUMBER", help="show one kernel: why it takes as long, and what lost against it"
    )
    explain.add_argument(
        "--html", type=Path, metavar="report.html", help="write a page with graph, roofline, timeline, sources"
    )
    explain.add_argument(
        "--peers", type=Path, metavar="bench.json", help="show on the page what `korch bench --json` printed"
    )
    explain.add_argument(
        "--onnx", type=Path, metavar="plan.onnx", help="write the plan as an ONNX model of a function for each kernel"
    )
    explain.add_argument(
        "--run",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the plan a few times for the page's timeline",
    )
    explain.set_defaults(command=_explain)

    profile = commands.add_parser("profile", help="time the kernels of an artifact in real runs")
    profile.add_argument("artifact", type=Path, metavar="OUT.korch")
    profile.add_argument("--rounds", type=int, default=30, metavar="N")
    profile.add_argument("--seed", type=int, default=0, help="of the random inputs")
    profile.add_argument("--json", action="store_true", help="print all kernels as JSON")
    profile.add_argument(
        "--trace",
        type=Path,
        metavar="trace.json",
        help="write one run as a trace that Perfetto and Chrome show, with a row for each thread",
    )
    profile.add_argument("--threads", action="store_true", help="show how evenly the threads of each kernel work")
    profile.set_defaults(command=_profile)

    unpack = commands.add_parser("unpack", help="write what a C program needs to run an artifact")
    unpack.add_argument("artifact", type=Path, metavar="OUT.korch")
    unpack.add_argument("folder", type=Path, metavar="FOLDER", help="empty, or not there yet")
    unpack.set_defaults(command=_unpack)

    for name, text in _STAGES.items():
        stage = commands.add_parser(name, help=text)
        stage.add_argument("model", type=Path, metavar="MODEL.onnx")
        stage.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=shape_help)
        _add_options(stage)
        stage.set_defaults(command=_stage, stage=name)

    doctor = commands.add_parser("doctor", help="check compiler, libraries and cache")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field of `Options`."""
    group = parser.add_argument_group("options")
    hints = typing.get_type_hints(Options)
    for field in flagged_fields():
        flag = "--" + RENAMED.get(field.name, field.name).replace("_", "-")
        text = field.metadata["help"]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if hints[field.name] is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            group.add_argument(flag, dest=field.name, action=action, default=default, help=text)
            continue
        kind, choices = _flag_type(hints[field.name])
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            flag,
            dest=field.name,
            type=kind,
            choices=choices,
            default=default,
            metavar=None if choices else kind.__name__.upper(),
            help=text + shown,
        )


def _flag_type(hint: Any) -> tuple[type, Sequence[Any] | None]:
    if typing.get_origin(hint) is typing.Literal:
        values = typing.get_args(hint)
        return type(values[0]), values
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return hint, None


def _options(parsed: argparse.Namespace) -> Options:
    return Options(**{f.name: getattr(parsed, f.name) for f in flagged_fields()})


def parse_bindings(texts: Sequence[str]) -> list[dict[str, tuple[int, ...]]]:
    """Return bindings of shapes from texts like `image=1x3x224x224` or `length=128,256`.

    Names are of inputs or of dimensions. Shapes that are separated by commas are alternatives: the
    first ones of all names make up the first binding, the second ones the second, and so on; a name
    with one shape has it in all bindings.

    Raises:
        OptionError: a text has another form, or names have different numbers of alternatives.
    """
    found: dict[str, list[tuple[int, ...]]] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        shapes = [part.split("x") if part else [] for part in sizes.split(",")]
        if not equals or not name or not all(_SIZE(n) for shape in shapes for n in shape):
            raise OptionError(
                f"can't read {text!r}",
                where="option --shape",
                expected="NAME=1x3x224x224, or NAME=128,256 for two bindings",
            )
        if name in found:
            raise OptionError(
                f"{name!r} is given twice",
                where="option --shape",
                expected=f"alternatives separated by commas: {name}=1,2",
            )
        found[name] = [tuple(map(int, shape)) for shape in shapes]
    counts = {len(shapes) for shapes in found.values() if len(shapes) > 1}
    if len(counts) > 1:
        raise OptionError(
            "the names have different numbers of alternatives: "
            + ", ".join(f"{name} {len(shapes)}" for name, shapes in found.items()),
            where="option --shape",
            expected="as many for each, or one",
        )
    return [
        {name: shapes[min(i, len(shapes) - 1)] for name, shapes in found.items()} for i in range(max(counts, default=1))
    ]


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the one binding that texts give.

    Raises:
        OptionError: a text has another form, or gives several.
    """
    bindings = parse_bindings(texts)
    if len(bindings) > 1:
        raise OptionError("there are several bindings", where="option --shape", expected="one here")
    return bindings[0]


def _optimize(parsed: argparse.Namespace) -> int:
    from korch.api import build
    from korch.report.explain import describe, summary
    from korch.report.progress import Bar
    from korch.runtime.record import to_json

    if parsed.dry_run:
        return _plan(parsed)
    if parsed.output is None:
        raise OptionError("there is no name for the artifact", where="option --output", expected="-o OUT.korch")
    read = [parsed.model]
    if os.path.exists(parsed.output):  # noqa: PTH110 - of any name
        from korch.frontend.tensors import data_files

        read += data_files(parsed.model)
    check_output(parsed.output, "--output", read)
    with Bar(parsed.budget_s, parsed.begun_s) as bar:
        executable = build(
            parsed.model,
            _options(parsed),
            parse_bindings(parsed.shape),
            bar.tell,
            Deadline.after(parsed.budget_s, parsed.begun_s),
        )
        bar.tell("save", str(parsed.output))
        executable.save(parsed.output)
    report = {"artifact": str(parsed.output), **executable.report}
    if parsed.json:
        print(to_json(report), end="")
    else:
        print(summary(report) if "plan" in report else describe(report))
    return 0


def _age_s() -> float:
    """Return for how long this process runs: its start counts as a part of a budget."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):  # another system than Linux
        return 0.0


def _plan(parsed: argparse.Namespace) -> int:
    from korch.pipeline import plan_model
    from korch.report.progress import Bar

    with Bar() as bar:
        found = plan_model(parsed.model, _options(parsed), parse_shapes(parsed.shape), bar.tell)
    print(json.dumps(found.to_json(), indent=1) if parsed.json else found.to_text())
    return 1 if found.failures else 0


def _run(parsed: argparse.Namespace) -> int:
    from korch.api import load

    if parsed.repeat < 0:
        raise OptionError(f"the value {parsed.repeat} is too small", "option --repeat", "at least 0")
    if parsed.output is not None:
        files = [Path(text.rpartition("=")[2]) for text in parsed.input]
        check_output(parsed.output, "--output", [parsed.artifact, *files])
    executable = load(parsed.artifact)
    feeds = _feeds(parsed, executable)
    outputs = executable.run(None, feeds)
    names = [tensor.name for tensor in executable.get_outputs()]
    if parsed.output is not None:
        _write_arrays(parsed.output, dict(zip(names, outputs, strict=True)))
    for name, array in zip(names, outputs, strict=True):
        print(f"{name}: {DType.of(array.dtype).value}{list(array.shape)}")
    if parsed.repeat > 0:
        arrays = [feeds[tensor.name] for tensor in executable.get_inputs()]
        times_ns = np.array(executable.time(arrays, parsed.repeat).run_ns)
        low, middle, high = np.percentile(times_ns / 1e6, [10, 50, 90])
        print(f"{parsed.repeat} runs: median {middle:.3f} ms, p10 {low:.3f}, p90 {high:.3f}")
    return 0


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a .npz file; unlike `numpy.savez` under exactly this name, and with any key."""
    with _writing(path, "option --output"), zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)


@contextmanager
def _writing(path: Path, where: str) -> Iterator[None]:
    """Turn what goes wrong while a file is written into an error that names the file.

    Raises:
        OptionError: it can't be written.
    """
    try:
        yield
    except OSError as error:
        raise OptionError(f"{path} can't be written ({error.strerror or error})", where) from error


def _feeds(parsed: argparse.Namespace, executable: Any) -> dict[str, Any]:
    from korch.report.peers.inputs import random_arrays

    feeds: dict[str, Any] = {}
    if parsed.random:
        plans = getattr(executable, "plans", None)  # of several shapes the first is taken
        inputs = (next(iter(plans.values())) if plans else executable).get_inputs()
        _require_static(inputs)
        feeds = random_arrays({t.name: (tuple(t.shape), t.dtype) for t in inputs}, parsed.seed)
    for text in parsed.input:
        known = [t.name for t in executable.get_inputs() if text.startswith(f"{t.name}=")]
        name = known[0] if known else text.partition("=")[0]
        file = text[len(name) + 1 :]
        if not name or not file:
            raise OptionError(f"can't read {text!r}", where="option --input", expected="NAME=x.npy")
        feeds[name] = _read_array(name, Path(file))
    return feeds


def _require_static(inputs: Sequence[Any]) -> None:
    for tensor in inputs:
        if tensor.dtype == np.dtype(object) or -1 in tensor.shape:
            raise OptionError(
                f"the input {tensor.name!r} is a {tensor.type}, which is not drawn",
                where="option --random",
                expected="--input for each input",
            )


def _read_array(name: str, path: Path) -> Any:
    where, expected = f"input {name!r}", "a .npy file"
    try:
        with open_file(path) as stream:
            _check_header(stream)
            return np.lib.format.read_array(stream, allow_pickle=False)
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror})", where, expected) from error
    except (ValueError, EOFError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no array ({error})", where, expected) from error


def _check_header(stream: IO[bytes]) -> None:
    """Check that a .npy file has the elements that its header announces, before room is made.

    Raises:
        ValueError: it has fewer, or no such header.
    """
    read = np.lib.format.read_array_header_1_0
    if np.lib.format.read_magic(stream) != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    claimed = math.prod(shape) * dtype.itemsize
    held = os.fstat(stream.fileno()).st_size - stream.tell()
    if min(shape, default=0) < 0 or claimed > held:
        raise ValueError(f"its header claims {claimed} bytes, and {held} are there")
    stream.seek(0)


def _bench(parsed: argparse.Namespace) -> int:
    from korch.report.bench import bench, bindings_of, shapes_text
    from korch.report.progress import Bar

    engines = [name for name in parsed.against.split(",") if name]
    found = []
    with Bar() as bar:
        for shapes in bindings_of(parsed.subject, parse_bindings(parsed.shape)):
            comparison = bench(parsed.subject, engines, parsed.model, parsed.rounds, _options(parsed), shapes, bar.tell)
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


def _profile(parsed: argparse.Namespace) -> int:
    from dataclasses import replace

    from korch.api import load
    from korch.errors import OptionError
    from korch.report.trace import trace
    from korch.runtime.executable import Executable
    from korch.runtime.record import to_json

    if parsed.rounds < 1:
        raise OptionError(f"the value {parsed.rounds} is too small", where="option --rounds", expected="at least 1")
    executable = load(parsed.artifact)
    if not isinstance(executable, Executable):
        raise OptionError(
            "it has several plans or parts on the host",
            where=str(parsed.artifact),
            expected="an artifact of one plan",
            hint="Optimize the model for one shape",
        )
    if parsed.trace is not None:
        check_output(parsed.trace, "--trace", [parsed.artifact])
    found = _profiled(executable, parsed.rounds, parsed.seed)
    threads, reason = None, ""
    if parsed.threads or parsed.trace is not None:
        threads, reason = _threads(parsed, executable, parsed.rounds, parsed.seed)
        found = found if threads is None else replace(found, loads=threads.loads())
    if parsed.trace is not None:
        text = json.dumps(trace(executable.plan, found, threads, reason))
        with _writing(parsed.trace, "option --trace"):
            parsed.trace.write_text(text)
    print(to_json(found.to_json()) if parsed.json else found.to_text())
    return 0


def _threads(parsed: argparse.Namespace, executable: Any, rounds: int, seed: int) -> tuple[Any, str]:
    """Return what the threads do in runs; or None and why that is not known."""
    from korch.errors import CompileError, MeasureError
    from korch.report.threads import watch_threads

    try:
        return watch_threads(parsed.artifact, executable.plan.threads, rounds, seed), ""
    except (CompileError, MeasureError) as error:
        print(f"korch: threads are not shown: {error}", file=sys.stderr)
        return None, str(error)


def _profiled(executable: Any, rounds: int, seed: int) -> Any:
    """Return the profile of an executable on random inputs."""
    from korch.report.peers.inputs import random_arrays
    from korch.report.profile import profile

    inputs = executable.get_inputs()
    feeds = random_arrays({t.name: (tuple(t.shape), t.dtype) for t in inputs}, seed)
    return profile(executable, [feeds[t.name] for t in inputs], rounds)


def _explain(parsed: argparse.Namespace) -> int:
    from korch.api import load

    for option, output in (("--html", parsed.html), ("--onnx", parsed.onnx)):
        if output is not None:
            read = (parsed.artifact, parsed.other, parsed.peers)
            check_output(output, option, [path for path in read if path is not None])
    executable = load(parsed.artifact)
    try:
        _show(parsed, executable)
    except KorchError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        named = [str(path) for path in (parsed.artifact, parsed.other) if path is not None]
        raise ArtifactError(
            f"its report can't be read ({type(error).__name__}: {error})",
            " or ".join(named),
            expected="a report as `korch optimize` writes it",
            hint="Build the artifact again",
        ) from error
    return 0


def _show(parsed: argparse.Namespace, executable: Any) -> None:
    """Print or write what `korch explain` was asked for."""
    from korch.api import load
    from korch.report.diff import differences, differences_page
    from korch.report.explain import describe, explain
    from korch.report.kernel import kernel_text
    from korch.runtime.record import to_json

    has_plan = hasattr(executable, "plan")
    if parsed.other is not None:
        other = load(parsed.other)
        if not has_plan or not hasattr(other, "plan"):
            raise OptionError(
                "one of the two has several plans", where=str(parsed.other), expected="artifacts of one plan each"
            )
        built = [(one.plan, one.report) for one in (executable, other)]
        if parsed.html is None:
            print(differences(*built))
        else:
            _write_html(parsed.html, differences_page(*built))
    elif parsed.onnx is not None:
        _write_plan_onnx(parsed, executable)
    elif parsed.html is not None:
        _write_page(parsed, executable, has_plan)
    elif not has_plan and parsed.kernel is not None:
        raise OptionError(
            "it has several plans or parts on the host", where=str(parsed.artifact), expected="an artifact of one plan"
        )
    elif not has_plan:
        report = {"artifact": str(parsed.artifact), **executable.report}
        print(to_json(report) if parsed.json else describe(report))
    elif parsed.json:
        print(executable.plan.to_json(), end="")
    elif parsed.kernel is not None:
        print(kernel_text(executable.plan, executable.report, parsed.kernel))
    else:
        print(explain(executable.plan, executable.report))


def _write_plan_onnx(parsed: argparse.Namespace, executable: Any) -> None:
    import onnx

    from korch.report.plan_onnx import plan_model
    from korch.runtime.executable import Executable

    if not isinstance(executable, Executable):
        raise OptionError(
            "only a plan for the CPU is written as ONNX", str(parsed.artifact), expected="an artifact of one plan"
        )
    model = plan_model(executable.plan, executable.artifact.weights.array)
    with _writing(parsed.onnx, "option --onnx"):
        onnx.save(model, str(parsed.onnx), save_as_external_data=model.ByteSize() > LARGEST_PROTOBUF)
    print(f"{parsed.onnx}: {len(model.functions)} kernels as functions")


def _write_page(parsed: argparse.Namespace, executable: Any, has_plan: bool) -> None:
    from korch.report.page import page
    from korch.runtime.executable import Executable

    if not has_plan:
        raise OptionError(
            "it has several plans or parts on the host", where=str(parsed.artifact), expected="an artifact of one plan"
        )
    run_ns = threads = None
    if parsed.run and isinstance(executable, Executable):
        threads, _ = _threads(parsed, executable, PAGE_ROUNDS, 0)
        run_ns = [kernel.median_ns for kernel in _profiled(executable, PAGE_ROUNDS, 0).kernels]
    peers: list[Any] = []
    if parsed.peers is not None:
        try:
            with open_file(parsed.peers) as stream:
                peers = json.load(stream)["rows"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise OptionError(
                f"{parsed.peers} is no comparison ({error})",
                "option --peers",
                expected="what `korch bench --json` prints",
            ) from error
    text = page(executable.plan, executable.report, executable.sources, run_ns, peers, threads)
    _write_html(parsed.html, text)


def _write_html(path: Path, text: str) -> None:
    with _writing(path, "option --html"):
        path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(text) / 1e6:.1f} MB, open it in a browser")


def _unpack(parsed: argparse.Namespace) -> int:
    from korch.runtime.unpack import unpack

    print(unpack(parsed.artifact, parsed.folder).to_text())
    return 0


def _stage(parsed: argparse.Namespace) -> int:
    from korch.candidate.enumerate import enumerate_groups
    from korch.candidate.shape import shapes_of
    from korch.equivalence.rules import select_rules
    from korch.equivalence.saturate import saturate
    from korch.fission import fission
    from korch.frontend.onnx import load_model
    from korch.primitive.lowering import lower_products
    from korch.primitive.text import format_graph
    from korch.provider.provider import load_providers

    options = _options(parsed)
    graph = fission(load_model(parsed.model, parse_shapes(parsed.shape)))
    if parsed.stage != "fission":
        graph, _ = saturate(lower_products(graph), strict=options.strict, rules=select_rules(options.ablation.rules))
    if parsed.stage != "candidates":
        print(format_graph(graph), end="")
        return 0
    groups, _ = enumerate_groups(graph, options, shapes=shapes_of(load_providers()))
    for number, group in enumerate(groups):
        print(f"# group {number}: primitives {', '.join(map(str, group.primitives))}")
        print(group.text)
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from korch.report.doctor import examine

    text, is_well = examine()
    print(text)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
