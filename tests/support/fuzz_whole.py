"""Runs a model as a user does: optimized within a budget, saved, loaded and run."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import korch
from korch.ablation import Ablation

BUDGET_S = 15.0

OVER, OVER_S = 1.1, 2.0
"""A budget may be exceeded by this factor and by these seconds; both excesses grow with the load of the machine."""


class OverrunError(Exception):
    """The budget is exceeded."""


def loaded(model: Any, *examples: Any, folder: Path, **options: Any) -> Any:
    """Return the executable of a model or module, from its artifact, with a plan that was measured.

    Args:
        model: what `korch.optimize` takes.
        examples: its example inputs.
        folder: the folder for the cache of kernels and for the artifact.
        options: further options of `korch.optimize`.

    Raises:
        KorchError: it can't be optimized.
        OverrunError: it took longer than the budget allows, or than the least that was announced instead.
    """
    allowed_s = [BUDGET_S]

    def tell(stage: str, text: str) -> None:
        allowed_s.extend(map(float, re.findall(r"the least is about (\d+) s", text)))

    begun_s, ablation = time.monotonic(), Ablation(baselines=False)
    executable: Any = korch.optimize(
        model,
        *examples,
        threads=1,
        budget=BUDGET_S,
        progress=tell,
        cache_folder=folder / "cache",
        ablation=ablation,
        **options,
    )
    executable.save(path := folder / f"whole-{os.getpid()}.korch")
    spent_s, least_s = time.monotonic() - begun_s, max(allowed_s)
    load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if spent_s > least_s + load * ((OVER - 1) * least_s + OVER_S):
        raise OverrunError(f"{spent_s:.1f} s of {least_s:.0f} s, at a load of {load:.1f} processes per core")
    return korch.load(path)
