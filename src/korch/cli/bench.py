"""`korch bench`: compare an artifact, or a model that is optimized first, with other engines in interleaved runs."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from korch.api import build
from korch.cli.select import inputs_at, plan_at, sizes_of
from korch.errors import ArtifactError, ModelError, OptionError
from korch.inputs import random_inputs
from korch.loading import load
from korch.options import Options
from korch.primitive.op import Array
from korch.ranges.binding import Bound
from korch.report.compare import Comparison, RunnerSpec, Settings, compare
from korch.report.explain import quality
from korch.report.peers import get_peer
from korch.report.peers.peer import require
from korch.report.peers.pytorch import TorchPeer
from korch.report.progress import Progress, Update, untold
from korch.runtime import ranged
from korch.runtime.artifact import read_format
from korch.runtime.ranged import RangedExecutable
from korch.runtime.record import ModelRecord
from korch.runtime.report import Report
from korch.runtime.runnable import Runnable, TensorInfo, random_feeds
from korch.runtime.shaped import FORMAT, ShapedExecutable
from korch.runtime.stateful import StatefulExecutable
from korch.system.files import open_file
from korch.system.scratch import scratch_folder

NOT_OF_BUILDS = ("search", "cache_folder")
"""Options that also apply to a built artifact: the seed of the inputs, and the folder of files."""


def bench(
    subject: Path,
    against: Sequence[str],
    model: Path | None,
    rounds: int,
    options: Options,
    shapes: Mapping[str, Sequence[int]],
    *,
    rest_ms: float = 0.0,
    tell: Progress = untold,
) -> Comparison:
    """Compare Korch with other engines. An engine that can't run the model is left out.

    Args:
        subject: an ONNX model, which is optimized first, or an artifact.
        against: names of other engines.
        model: for an artifact, the model that the other engines run; by default the model that it was
            built from, which must not have changed since. PyTorch does not need it.
        rounds: the number of turns of each engine.
        options: for a model, how to optimize it.
        shapes: sizes for inputs with unknown dimensions, by input name. For an artifact with several
            plans, they must be those of one plan; for an artifact for ranges, any sizes in the ranges.
        rest_ms: milliseconds that each engine rests before a timed run.
        tell: called with each step.

    Raises:
        KorchError: an engine or the model is missing, or Korch fails.
    """
    if rounds < 1:
        raise OptionError(f"the value {rounds} is too small", where="option --rounds", expected="at least 1")
    for name in against:
        require(get_peer(name))
    with scratch_folder() as folder:
        executable, artifact = _subject(subject, folder, options, shapes, tell)
        path = model
        is_read = not all(isinstance(get_peer(name), TorchPeer) for name in against)  # PyTorch runs a module instead
        if path is None and is_read:
            path = _recorded_model(executable.model, artifact) if artifact == subject else subject
        if path is not None and not path.is_file():
            raise ModelError("there is no such file", where=str(path))
        described, report = executable.get_inputs(), executable.report
        counts, step = dict[str, Array](), tuple[str, ...]()
        if isinstance(executable, StatefulExecutable):
            described, counts, text = _step(executable, shapes)
            step = (text,)
        if isinstance(executable, RangedExecutable):
            sizes = sizes_of(executable, {**executable.planned_bindings()[0], **shapes})  # else the largest sizes
            described, report = executable.inputs_at(sizes), executable.serving(sizes)[0].report
        known = {tensor.name: tensor.shape for tensor in described if -1 not in tensor.shape}
        known |= {name: array.shape for name, array in counts.items()}
        seed = options.search.seed
        inputs = random_inputs(path, seed, {**shapes, **known}) if path is not None else random_feeds(described, seed)
        inputs = {**inputs, **counts}
        runners = [RunnerSpec("korch", artifact)]
        runners += [RunnerSpec(name, path or artifact, get_peer(name).name) for name in against]
        notes = (*step, *(quality(report) if isinstance(report, Report) else [executable.facts()]))
        settings = Settings(executable.threads, rounds, rest_ms=rest_ms, leave_out=True)
        del executable  # its weights and threads are not part of the comparison
        comparison = compare(runners, inputs, settings, progress=lambda text: tell(Update("compare", text)))
        return replace(comparison, notes=notes)


def _step(
    executable: StatefulExecutable, shapes: Mapping[str, Sequence[int]]
) -> tuple[list[TensorInfo], dict[str, Array], str]:
    """Return the inputs of a step of a session, those that count rows, and a line on what is timed."""
    described = inputs_at(executable, shapes)
    rows, past = executable.counts_of([np.empty(tensor.shape, bool) for tensor in described])
    text = f"korch: {rows} new rows after {past} in a session; other engines take and return the states"
    return described, executable.counters_at(past, rows), text


def _subject(
    subject: Path, folder: Path, options: Options, shapes: Mapping[str, Sequence[int]], tell: Progress
) -> tuple[Runnable, Path]:
    """Return the executable of the subject, and the path of its artifact; a model is optimized first."""
    if subject.suffix == ".korch":
        _refuse_options(subject, options)
        return _load(subject, shapes), subject
    binding = {name: tuple(shape) for name, shape in shapes.items()}
    executable = build(subject, options, [binding], tell)
    artifact = folder / "subject.korch"
    executable.save(artifact)
    return executable, artifact


def _refuse_options(artifact: Path, options: Options) -> None:
    """Refuse options that have no effect on an artifact because they only say how to build one."""
    standard = Options()
    for field in fields(Options):
        if field.name not in NOT_OF_BUILDS and getattr(options, field.name) != getattr(standard, field.name):
            raise OptionError(
                f"it says how an artifact is built, and {artifact} is built already",
                where=f"option --{field.name.removesuffix('_s').replace('_', '-')}",
                hint="Leave it out, or give the model in place of the artifact",
            )


def bindings_of(
    subject: Path, given: Sequence[Mapping[str, tuple[Bound, ...]]]
) -> Sequence[Mapping[str, tuple[Bound, ...]]]:
    """Return the bindings to compare one after another: the given ones, or else those of an artifact.

    An artifact for ranges of sizes is compared at the sizes at which its plans were timed.

    Raises:
        ArtifactError: the artifact can't be read.
    """
    kind = read_format(subject) if subject.suffix == ".korch" and not any(given) else ""
    if kind == ranged.FORMAT:
        return RangedExecutable.load(subject).planned_bindings()
    if kind != FORMAT:
        return list(given)
    plans = ShapedExecutable.load(subject).plans.values()
    return [{tensor.name: tensor.shape for tensor in plan.plan.inputs} for plan in plans]


def _load(path: Path, shapes: Mapping[str, Sequence[int]]) -> Runnable:
    """Return the executable of an artifact; if it has a plan for each of several shapes, the one for these."""
    executable: Runnable = load(path)
    is_served = isinstance(executable, RangedExecutable | StatefulExecutable)
    is_shaped = isinstance(executable, ShapedExecutable) and not is_served
    return plan_at(executable, shapes, path) if is_shaped else executable


def _recorded_model(record: ModelRecord, artifact: Path) -> Path:
    hint = "Name the model with --model"
    if not record.path:
        raise ArtifactError("it does not say which model it was built from", where=str(artifact), hint=hint)
    path = Path(record.path)
    if not path.is_file():
        raise ArtifactError(
            f"the model {path} that it was built from does not exist any more", where=str(artifact), hint=hint
        )
    with open_file(path) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != record.sha256:
        raise ArtifactError(f"the model {path} has changed since it was built", where=str(artifact), hint=hint)
    return path
