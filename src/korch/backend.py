"""What a target brings: a meter of costs, and how an executable is made of chosen kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from korch.candidate.candidate import ALL_PAIRS, Group, Offer, Refusal
from korch.cuda.target import NOMINAL
from korch.extras import install_command
from korch.measure.compiler import Builder
from korch.measure.meter import AnyMeter
from korch.measure.toolchain import find_compiler
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.provider.families import Families
from korch.provider.provider import CUDA_ENTRY_POINT_GROUP, load_providers
from korch.ranges.plan import RangePlan
from korch.runtime.program import PlanStep
from korch.runtime.record import ModelRecord
from korch.target import detect_target
from korch.validation.plan import Make

NO_OPAQUE = f"no provider of such operators is installed; {install_command('onnxruntime')}"
"""Why an operator without a fission rule is left to the host, if no provider runs any."""

if TYPE_CHECKING:
    from korch.runtime.cuda.executable import CudaExecutable
    from korch.runtime.executable import Executable


def open_meter(options: Options, weights_bytes: int = 0) -> AnyMeter:
    """Return the meter of the target that some options name; it is a context.

    Args:
        options: the target, threads, cache folder.
        weights_bytes: of the model's constants: many of them are in no cache when a run begins.

    Raises:
        UnsupportedError: the target is not there.
    """
    if options.is_cuda:
        from korch.measure.cuda.meter import CudaMeter

        return CudaMeter(options, load_providers(CUDA_ENTRY_POINT_GROUP))
    from korch.measure.cpu import CpuMeter

    return CpuMeter(options, load_providers(), weights_bytes)


def builder_of(options: Options) -> Builder:
    """Return the compiler for the CPU, with the cache that some options name."""
    return Builder(detect_target(options.threads, find_compiler().identity).isa, options.cache_folder)


def has_kernels(options: Options, with_few_pairs: bool = False) -> Callable[[Group], bool]:
    """Return what says whether some provider of the CPU has a kernel for a group.

    Args:
        options: the threads, and whether only strict kernels are used.
        with_few_pairs: whether only kernels count whose matrix units multiply numbers of fewer components than float32.
    """

    def counts(offer: Offer) -> bool:
        return 0 < offer.pairs < ALL_PAIRS if with_few_pairs else True

    target = detect_target(options.threads, find_compiler().identity, matrix_units=not options.strict)
    providers = load_providers()
    known: dict[str, bool] = {}

    def has_kernel(group: Group) -> bool:
        if group.key not in known:
            offers = (provider.offer(group, target) for provider in providers)
            known[group.key] = any(not isinstance(found, Refusal) and any(map(counts, found)) for found in offers)
        return known[group.key]

    return has_kernel


def opaque_refusals(options: Options) -> Callable[[Group], str]:
    """Return what says why no provider of a target runs an operator without a fission rule; "" if one does."""
    if options.is_cuda:
        target: Any = NOMINAL[90]
        providers = load_providers(CUDA_ENTRY_POINT_GROUP)
    else:
        target, providers = detect_target(options.threads, find_compiler().identity), load_providers()
    asked = [provider for provider in providers if getattr(provider, "runs_opaque", False)]

    def refusal_of(group: Group) -> str:
        found = [provider.offer(group, target) for provider in asked]
        reasons = [offers.reason for offers in found if isinstance(offers, Refusal)]
        return "; ".join(reasons) or NO_OPAQUE if len(reasons) == len(found) else ""

    return refusal_of


def maker(
    graph: PrimitiveGraph,
    meter: AnyMeter,
    options: Options,
    *,
    model: ModelRecord | None,
    certificate: object,
    runs_tasks: bool = False,
    ranges: RangePlan | None = None,
    families: Families | None = None,
) -> Make:
    """Return what makes an executable of a plan's kernels.

    Args:
        graph: the model's graph.
        meter: has compiled the kernels.
        options: kept in the plan.
        model: what the graph was made from.
        certificate: what the search proved.
        runs_tasks: whether threads, or programs of persistent kernels, wait for tasks, not for all that a kernel does.
        ranges: how plans serve smaller sizes, for which their kernels compute what is needed only (on CPUs only).
        families: the kernels of other sizes, with which those of the plan share code (on CPUs only).
    """
    from korch.runtime.build import Origin

    origin = Origin(model, certificate, options)
    parts = options.search.task_parts if runs_tasks else 0
    if options.is_cuda:

        def make_cuda(steps: Sequence[PlanStep[Any]]) -> CudaExecutable:
            from korch.measure.cuda.meter import CudaMeter
            from korch.runtime.cuda.build import build_cuda
            from korch.runtime.cuda.executable import CudaExecutable, with_best_branches

            if not isinstance(meter, CudaMeter):
                raise AssertionError("a meter of another target")
            program = build_cuda(graph, steps, meter.target, meter.compiler, origin, parts)
            return CudaExecutable(program) if parts else with_best_branches(program)

        return make_cuda

    def make(steps: Sequence[PlanStep[Any]]) -> Executable:
        from korch.measure.cpu import CpuMeter
        from korch.runtime.build import build
        from korch.runtime.executable import Executable
        from korch.runtime.trim import trim_steps

        if not isinstance(meter, CpuMeter):
            raise AssertionError("a meter of another target")
        if ranges is not None:
            steps = trim_steps(graph, steps, ranges, meter.target)
        if families is not None:
            steps = _sharing(steps, families, meter.builder)
        return Executable(build(graph, steps, meter.target, meter.builder, origin, parts))

    return make


def _sharing(steps: Sequence[PlanStep[Any]], families: Families, builder: Builder) -> list[PlanStep[Any]]:
    """Return the steps of a plan with kernels that share code with those of other sizes."""
    kernels = families.share(
        [(step.candidate.key, step.kernel) for step in steps],
        lambda texts: [isinstance(found, Path) for found in builder.compile(texts)],
    )
    return [replace(step, kernel=kernel) for step, kernel in zip(steps, kernels, strict=True)]
