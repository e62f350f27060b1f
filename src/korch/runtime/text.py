"""Executable -> its `repr`: a few lines about the model, inputs, outputs, kernels and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from korch.runtime.record import PlanRecord

if TYPE_CHECKING:
    from korch.runtime.report import AnyReport, Report

MOST_TENSORS = 8
"""The most inputs, and the most outputs, that are listed, each on a line."""


class Described(Protocol):
    """The part of an executable's interface that its `repr` needs."""

    @property
    def report(self) -> AnyReport:
        """How its plans were found."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The elements of the inputs that need not be given."""

    def get_inputs(self) -> Sequence[Any]:
        """Return descriptions of the inputs."""

    def get_outputs(self) -> Sequence[Any]:
        """Return descriptions of the outputs."""


def plan_facts(plan: PlanRecord, report: Report) -> str:
    """Return one line about a plan: model, kernels, threads or device, and its times."""
    name = plan.model.path.rpartition("/")[2] or "a model"
    where = "on a CUDA device" if "arch" in plan.target else f"on {counted(plan.threads, 'thread')}"
    parts = [f"{name}: {counted(plan.kernel_count, 'kernel')} {where}"]
    if times := report.times:
        parts.append(f"{times.median_ms:.3f} ms measured{', disturbed' * times.is_disturbed}")
    if report.gap is not None:
        parts.append(f"gap {report.gap:.1%}")
    return ", ".join(parts)


def executable_text(executable: Described, facts: str) -> str:
    """Return what `repr` shows of an executable."""
    lines = [f"<{type(executable).__name__} {facts}"]
    for kind, tensors in (("input", executable.get_inputs()), ("output", executable.get_outputs())):
        for tensor in tensors[:MOST_TENSORS]:
            default = ", has a default" if kind == "input" and tensor.name in executable.defaults else ""
            lines.append(f"  {kind} {tensor.name!r}: {tensor.type} {tensor.shape}{default}")
        if len(tensors) > MOST_TENSORS:
            lines.append(f"  and {counted(len(tensors) - MOST_TENSORS, f'more {kind}')}")
    return "\n".join(lines) + ">"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"
