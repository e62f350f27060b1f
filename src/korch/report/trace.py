"""A run as a trace: what Perfetto and Chrome's tracing page show.

Each kernel is one span: its threads begin and end together, so a span is what all of them took.
Source: the Trace Event Format, "complete events".
"""

from __future__ import annotations

from typing import Any

from korch.report.kernel import operations
from korch.report.profile import Profile
from korch.runtime.record import PlanRecord


def trace(plan: PlanRecord, profile: Profile) -> dict[str, Any]:
    """Return the trace of a median run.

    Args:
        plan: the kernels in order.
        profile: their times inside of runs.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": plan.model.path or "model"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 0,
         "args": {"name": f"kernels, each on {plan.threads} threads"}},
    ]  # fmt: skip
    at_us = 0.0
    for number, (step, kernel) in enumerate(zip(plan.steps, profile.kernels, strict=True)):
        duration_us = kernel.median_ns / 1e3
        events.append({
            "name": operations(step), "cat": step.provider, "ph": "X", "ts": at_us,
            "dur": duration_us, "pid": 1, "tid": 0,
            "args": {
                "kernel": number, "provider": step.provider, "variant": step.variant,
                "alone us": step.cost_ns / 1e3, "bound us": step.bound_ns / 1e3,
                "bytes": step.size_bytes, "FLOP": step.work_flop,
                "origins": [origin for origin in step.origins if origin],
            },
        })  # fmt: skip
        at_us += duration_us
    return {"traceEvents": events, "displayTimeUnit": "ns"}
