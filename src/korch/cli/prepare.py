"""`korch prepare` and `korch measure`: kernels are compiled here, and measured where a device is."""

from __future__ import annotations

import argparse
from pathlib import Path

from korch.cli.arrays import writing
from korch.cli.flags import add_options, options_of
from korch.cli.shapes import parse_shapes
from korch.system.files import check_output

KERNELS = 2000
"""The most kernels of a model, by default."""

OPTIONS = ("target", "budget_s", "strict", "precision", "cache_folder")


def add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser], shape_help: str) -> None:
    """Add both commands."""
    parser = commands.add_parser("prepare", help="compile a model's kernels for a CUDA device, to be measured there")
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="JOBS", help="the file to write, or to add kernels to"
    )
    kernels = f"at most N kernels, but all of the best plan (default: {KERNELS})"
    parser.add_argument("--kernels", type=int, default=KERNELS, metavar="N", help=kernels)
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=1x3x224x224", help=shape_help)
    add_options(parser, OPTIONS)
    parser.set_defaults(command=prepare)
    parser = commands.add_parser("measure", help="measure kernels on this machine's CUDA device; nothing is planned")
    parser.add_argument("jobs", type=Path, metavar="JOBS", help="what `korch prepare` has written")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="RECORDS",
        help="where records are appended, for `korch database import`; kernels that have one there are left out",
    )
    parser.add_argument("--seconds", type=float, metavar="N", help="stop after N seconds")
    parser.set_defaults(command=measure)


def prepare(parsed: argparse.Namespace) -> int:
    """Add a model's most promising kernels to a file of jobs."""
    from korch.cuda.measure.job_file import JobFile
    from korch.pipeline.prepare import prepare_model
    from korch.report.progress import Bar

    check_output(parsed.output, "--output", [parsed.model])
    with Bar(parsed.budget_s) as bar, writing(parsed.output, "option --output"):
        file = JobFile(parsed.output)
        options, shapes = options_of(parsed), parse_shapes(parsed.shape)
        found = prepare_model(parsed.model, options, shapes, file, parsed.kernels, bar.tell)
    print(
        f"{parsed.output}: {found.added} kernels added, {len(file.keys)} in all, {file.size_bytes / 2**20:.1f} MiB; of "
        f"{found.candidates} candidates {found.ranked} are worth measuring: {found.known} equal kernels are known, "
        f"{found.refused} can't be compiled, {found.left} are left"
    )
    return 0


def measure(parsed: argparse.Namespace) -> int:
    """Measure the kernels of a file of jobs."""
    from korch.cuda.measure.bulk import measure_jobs

    check_output(parsed.output, "--output", [parsed.jobs])
    with writing(parsed.output, "option --output"):
        found = measure_jobs(parsed.jobs, parsed.output, parsed.seconds, lambda text: print(text, flush=True))
    print(f"{parsed.output}: {found.measured} kernels measured, {found.failed} failed, {found.left} left")
    return 0
