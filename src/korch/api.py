"""The Python interface: `optimize`, `load`, and what they give."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from korch.options import Options, default_threads
from korch.pipeline import Progress, optimize_model
from korch.runtime.executable import Executable
from korch.runtime.executable import load as load_executable


def optimize(
    model: str | os.PathLike[str] | bytes | Any,
    *,
    target: str = "cpu",
    threads: int | None = None,
    budget: float | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Executable:
    """Optimize a model for this machine.

    Args:
        model: the path of an ONNX file, its bytes, or an `onnx.ModelProto`.
        target: what to build for.
        threads: threads of the executable; all cores by default.
        budget: seconds after which the best plan so far is built.
        shapes: sizes for inputs with unknown dimensions, by input name.
        strict: only rewrites and algorithms that keep the order of floating-point operations, up
            to the order of reductions.
        progress: called with a stage's name and a line of text.
        **options: further fields of `korch.options.Options`.

    Returns:
        The executable: call it with arrays, or use `run` as of an ONNX Runtime session.

    Raises:
        KorchError: the model, an option or the machine is not fit; the text says what to do.
    """
    record = Options(
        target=target, threads=default_threads() if threads is None else threads,
        budget_s=budget, strict=strict, **options,
    )  # fmt: skip
    source = Path(model) if isinstance(model, os.PathLike) else model
    bound = {name: tuple(int(n) for n in shape) for name, shape in (shapes or {}).items()}
    return optimize_model(source, record, bound, progress)


def load(path: str | os.PathLike[str]) -> Executable:
    """Load an artifact that `Executable.save` or `korch optimize` wrote.

    Raises:
        ArtifactError: it is damaged, or built for another machine.
    """
    return load_executable(path)
