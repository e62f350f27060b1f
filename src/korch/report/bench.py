"""An artifact (or a model, optimized first) against other engines, in one interleaved run."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from korch.errors import ArtifactError, ModelError, OptionError
from korch.options import Options
from korch.report.compare import Comparison, RunnerSpec, compare
from korch.report.explain import quality
from korch.report.peers import get_peer
from korch.report.peers.inputs import random_inputs
from korch.report.peers.peer import require
from korch.runtime.artifact import read_format
from korch.runtime.executable import load
from korch.runtime.record import ModelRecord

Tell = Callable[[str, str], None]


def bench(
    subject: Path, against: Sequence[str], model: Path | None, rounds: int, options: Options,
    shapes: Mapping[str, Sequence[int]], tell: Tell | None = None,
) -> Comparison:  # fmt: skip
    """Compare Korch with other engines. One that can't run the model is left out.

    Args:
        subject: an ONNX model, which is optimized first, or an artifact.
        against: names of other engines.
        model: for an artifact, the model that the others run; by default the one that it was
            built from, which must not have changed since.
        rounds: how often each engine has its turn.
        options: for a model, how to optimize it.
        shapes: sizes for inputs with unknown dimensions, by input name.
        tell: told of progress.

    Raises:
        KorchError: an engine or the model is missing, or Korch fails.
    """
    say = tell or (lambda stage, text: None)
    if rounds < 1:
        raise OptionError(f"the value {rounds} is too small", where="option --rounds",
                          expected="at least 1")  # fmt: skip
    for name in against:
        require(get_peer(name))
    with tempfile.TemporaryDirectory(prefix="korch-bench-") as folder:
        if subject.suffix == ".korch":
            artifact = subject
            if read_format(artifact) not in ("korch", ""):
                raise OptionError(
                    "it has several plans or parts on the host", where=str(artifact),
                    expected="an artifact of one plan", hint="Optimize the model for one shape",
                )  # fmt: skip
            executable = load(artifact)
            plan = executable.plan
            path = model if model is not None else _recorded_model(plan.model, artifact)
        else:
            from korch.pipeline import optimize_model

            bound = {name: tuple(shape) for name, shape in shapes.items()}
            executable = optimize_model(subject, options, bound, say)
            artifact = Path(folder) / "subject.korch"
            executable.save(artifact)
            plan, path = executable.plan, model or subject
        if not path.is_file():
            raise ModelError("there is no such file", where=str(path))
        known = {tensor.name: tensor.shape for tensor in plan.inputs}
        inputs = random_inputs(path, seed=options.seed, shapes={**known, **shapes})
        runners = [RunnerSpec("korch", artifact)]
        runners += [RunnerSpec(name, path, get_peer(name).name) for name in against]
        notes = tuple(quality(executable.report))
        del executable  # its weights and threads are not part of the comparison
        comparison = compare(
            runners, inputs, threads=plan.threads, rounds=rounds, leave_out=True,
            progress=lambda text: say("compare", text),
        )  # fmt: skip
        return replace(comparison, notes=notes)


def _recorded_model(record: ModelRecord, artifact: Path) -> Path:
    hint = "Name the model with --model"
    if not record.path:
        raise ArtifactError("it does not say which model it was built from", where=str(artifact),
                            hint=hint)  # fmt: skip
    path = Path(record.path)
    if not path.is_file():
        raise ArtifactError(f"the model {path} that it was built from is gone",
                            where=str(artifact), hint=hint)  # fmt: skip
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != record.sha256:
        raise ArtifactError(f"the model {path} has changed since it was built",
                            where=str(artifact), hint=hint)  # fmt: skip
    return path
