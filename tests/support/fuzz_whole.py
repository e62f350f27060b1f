"""Runs a model as a user does: optimized within a budget, saved, loaded and run."""

import math
import os
import re
import time
from pathlib import Path
from typing import Any

import korch
from korch.ablation import Ablation
from korch.pipeline import Update

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

    def tell(update: Update) -> None:
        allowed_s.extend(map(float, re.findall(r"the least is about (\d+) s", update.text)))

    begun_s, load_before, cpu_before = time.monotonic(), os.getloadavg()[0], _cpu_s()
    ablation = Ablation(baselines=False)
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
    load = max(1.0, mean_load(load_before, os.getloadavg()[0], spent_s) / (os.cpu_count() or 1))
    if spent_s > least_s + load * ((OVER - 1) * least_s + OVER_S):
        own = f"{_cpu_s() - cpu_before:.1f} s of CPU time"
        raise OverrunError(f"{spent_s:.1f} s of {least_s:.0f} s, {own}, at a load of {load:.1f} processes per core")
    return korch.load(path)


def mean_load(before: float, after: float, seconds: float) -> float:
    """Return the mean load of some seconds, from the system's averages before and after them.

    These averages are damped: a load counts e times less for each minute that it is older. So after a short time the
    second one mostly shows what was before.
    """
    kept = math.exp(-seconds / 60)
    return (after - before * kept) / (1 - kept)


def _cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
