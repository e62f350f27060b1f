"""Searches the plan of a model, keeps it in a file, and rebuilds its kernels for other numbers of threads."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.suite import load
from korch.candidate.candidate import Refusal
from korch.measure.compiler import Builder
from korch.measure.cpu import CpuMeter
from korch.options import Options
from korch.pipeline.optimize import run_until
from korch.pipeline.run import Run, few_collections
from korch.primitive.graph import PrimitiveGraph
from korch.provider.provider import Kernel, Provider, load_providers
from korch.runtime.bind import PlanStep
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.runtime.library import Handle
from korch.search.result import PlanName
from korch.segments.join import with_constants_of
from korch.target import Target

Plan = tuple[PrimitiveGraph, Sequence[PlanStep[Kernel]], Target]
"""The model's graph, its kernels in order, and the target of the kernels."""


def searched(name: str, folder: Path, budget_s: float) -> Plan:
    """Return a model's plan for two threads from a folder; if it is not there, search the plan and write it there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pickle"
    if not path.exists():
        path.write_bytes(pickle.dumps(_search(name, Options(threads=2, budget_s=budget_s))))
    plan: Plan = pickle.loads(path.read_bytes())
    return plan


@few_collections()
def _search(name: str, options: Options) -> Plan:
    run = Run(options, {}, lambda update: print(name, update, flush=True), load(name).SerializeToString())
    with run.resources:
        run_until(run, "orchestrate", skip=("reference",))
        offered, chosen = run.results["candidates"], run.results["orchestrate"].outcome.plans[PlanName.SEARCHED]
        meter, steps = offered.meter, []
        if not isinstance(meter, CpuMeter):
            raise AssertionError("a meter of another target")
        for candidate in chosen:
            kernel = meter.kernel(candidate)
            if isinstance(kernel, Refusal):
                raise SystemExit(kernel.reason)
            cost_ns, is_measured = offered.ledger.cost_ns(candidate)
            steps.append(PlanStep(candidate, kernel, cost_ns, meter.bound_ns(candidate), is_measured))
        return with_constants_of(run.results["saturate"].joined.graph, [chosen]), steps, meter.target


def run_times_ns(handle: Handle, inputs: Sequence[int], outputs: Sequence[int], runs: int) -> list[int]:
    """Return the times of `runs` runs in nanoseconds, without the time that Python needs before and after them."""
    found = []
    for _ in range(runs):
        begin = time.perf_counter_ns()
        handle.run(inputs, outputs)
        found.append(time.perf_counter_ns() - begin)
    return found


def for_threads(plan: Plan, threads: int) -> Plan:
    """Return the plan with its kernels rebuilt for another number of threads.

    A kernel stays as it is if its provider does not offer the same one.
    """
    graph, steps, target = plan
    target = replace(target, threads=threads)
    providers = {provider.name: provider for provider in load_providers()}
    made = [_step(providers[s.candidate.provider], s, target) if s.kernel.symbol else s for s in steps]
    return graph, made, target


def _step(provider: Provider[Target, Kernel], step: PlanStep[Kernel], target: Target) -> PlanStep[Kernel]:
    wanted = step.candidate.offer
    offers = provider.offer(step.candidate.group, target)
    for offer in () if isinstance(offers, Refusal) else offers:
        if (offer.variant, offer.inputs, offer.outputs) == (wanted.variant, wanted.inputs, wanted.outputs):
            kernel = provider.build(step.candidate.group, offer, target)
            if isinstance(kernel, Kernel):
                return replace(step, kernel=kernel)
    return step


def executable(plan: Plan, parts: int = 0) -> Executable:
    """Return an executable with joins; if `parts` is not 0, with a thread's grid points in `parts` tasks."""
    graph, steps, target = plan
    return Executable(build(graph, steps, target, Builder(target.isa), parts=parts))
