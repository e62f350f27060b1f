"""The parts that depend on the target: the meter of costs, and how chosen kernels become an executable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from korch.candidate.candidate import ALL_PAIRS, Group, Offer, Refusal
from korch.cuda.target import NOMINAL
from korch.measure.compiler import Builder, target_of
from korch.measure.meter import AnyMeter
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.provider.faults import Faults
from korch.provider.provider import CUDA_ENTRY_POINT_GROUP, load_providers
from korch.runtime.bind import PlanStep
from korch.runtime.record import ModelRecord
from korch.system.deadline import Deadline
from korch.system.extras import install_command
from korch.validation.plan import Make

TASK_PARTS = 2  # tasks into which the grid points of each thread are cut, so that readers begin when some are done

NO_OPAQUE = f"no provider of such operators is installed; {install_command('onnxruntime')}"
"""The reason why an operator without a fission rule runs on the host, if no provider runs such operators."""

if TYPE_CHECKING:
    from korch.cuda.runtime.executable import CudaExecutable
    from korch.runtime.executable import Executable


def open_meter(options: Options, weights_bytes: int = 0, end: Deadline | None = None) -> AnyMeter:
    """Return the meter of the target that the options name; it is a context manager.

    `weights_bytes`: size of the model's constants; if it is large, they are not in a cache when a run begins.

    Raises:
        UnsupportedError: the target is not available.
    """
    if options.is_cuda:
        from korch.cuda.measure.meter import CudaMeter

        return CudaMeter(options, load_providers(CUDA_ENTRY_POINT_GROUP))
    from korch.measure.cpu import CpuMeter

    return CpuMeter(options, load_providers(), weights_bytes, end)


def builder_of(options: Options) -> Builder:
    """Return the compiler for the CPU, with the cache folder that the options name."""
    return Builder(target_of(options).isa, options.cache_folder)


def has_kernels(options: Options, with_few_pairs: bool = False) -> Callable[[Group], bool]:
    """Return a function that says whether any CPU provider has a kernel for a group.

    Args:
        options: the threads, and whether only strict kernels are used.
        with_few_pairs: count only kernels that compute products from fewer pairs of components than float32 needs.
    """

    def counts(offer: Offer) -> bool:
        return 0 < offer.pairs < ALL_PAIRS if with_few_pairs else True

    target = target_of(options)
    providers, faults = load_providers(), Faults()
    known: dict[str, bool] = {}

    def has_kernel(group: Group) -> bool:
        if group.key not in known:
            offers = (faults.offers(provider, group, target) for provider in providers)
            known[group.key] = any(not isinstance(found, Refusal) and any(map(counts, found)) for found in offers)
        return known[group.key]

    return has_kernel


def kernel_providers(options: Options) -> Callable[[Group], dict[str, bool]]:
    """Return a function that names the CPU providers with a kernel for a group; true for those of a library."""
    target, providers, faults = target_of(options), load_providers(), Faults()

    def providers_of(group: Group) -> dict[str, bool]:
        return {
            provider.name: bool(getattr(provider, "runs_opaque", False))
            for provider in providers
            if not isinstance(faults.offers(provider, group, target), Refusal)
        }

    return providers_of


def opaque_refusals(options: Options) -> Callable[[Group], str]:
    """Return a function that says why no provider of the target runs an operator without a fission rule.

    It returns "" if a provider runs the operator.
    """
    if options.is_cuda:
        target: Any = NOMINAL[90]
        providers = load_providers(CUDA_ENTRY_POINT_GROUP)
    else:
        target, providers = target_of(options), load_providers()
    asked, faults = [provider for provider in providers if getattr(provider, "runs_opaque", False)], Faults()

    def refusal_of(group: Group) -> str:
        found = [faults.offers(provider, group, target) for provider in asked]
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
) -> Make:
    """Return a function that builds an executable from a plan's kernels.

    `runs_tasks`: whether threads wait for single tasks, not for whole kernels (on CPUs only).
    """
    from korch.runtime.build import Origin

    origin = Origin(model, certificate, options.recorded)
    parts = TASK_PARTS if runs_tasks else 0
    if options.is_cuda:

        def make_cuda(steps: Sequence[PlanStep[Any]]) -> CudaExecutable:
            from korch.cuda.measure.meter import CudaMeter
            from korch.cuda.runtime.build import build_cuda
            from korch.cuda.runtime.early import early_program
            from korch.cuda.runtime.executable import with_best_schedule

            if not isinstance(meter, CudaMeter):
                raise AssertionError("a meter of another target")
            program = build_cuda(graph, steps, meter.target, meter.compiler, origin)
            return with_best_schedule(program, early_program(program, meter.compiler))

        return make_cuda

    def make(steps: Sequence[PlanStep[Any]]) -> Executable:
        from korch.measure.cpu import CpuMeter
        from korch.runtime.build import build
        from korch.runtime.executable import Executable

        if not isinstance(meter, CpuMeter):
            raise AssertionError("a meter of another target")
        return Executable(build(graph, steps, meter.target, meter.builder, origin, parts))

    return make
