"""A model -> what `korch optimize` would do with it: what runs where and why, and what the first plan needs.

Nothing is searched, compiled or run. The answers are those of an optimization: of its stages up to fission, of the cut
into segments for the host, and of the providers.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field

from korch.backend import kernel_providers
from korch.candidate.candidate import make_group
from korch.errors import ModelError, UnknownSizeError, UnsupportedError
from korch.frontend.onnx import LoadedModel, ModelSource, read_model
from korch.frontend.segments import HostSegment
from korch.host.engine import NOT_INSTALLED
from korch.host.optimize import several_with_host, split_for_host
from korch.measure.compiler import target_of
from korch.options import Options
from korch.pipeline import Run, run_until, untold
from korch.pipeline.assumed import assumed, assumed_text, fixed
from korch.pipeline.each_size import has_time_for_each
from korch.pipeline.least import Least, least_of, work_of
from korch.pipeline.quantized import is_quantized
from korch.pipeline.ranges import compared_shares, no_ranges
from korch.pipeline.source import onnx_source
from korch.pipeline.stateful import state_sizes, step_sources
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.types import NARROW, DType
from korch.ranges.binding import Bound, binding_of, dimensions_of, has_range, is_open, static
from korch.ranges.form import Dimension
from korch.report.units import size_text
from korch.runtime.text import counted
from korch.system.deadline import Deadline
from korch.system.extras import install_command
from korch.target import OF_COMPONENTS, Target
from korch.validation.standard import check_memory

Binding = Mapping[str, tuple[Bound, ...]]

MOST_NODES = 3  # the most nodes that a line names


@dataclass(frozen=True, slots=True)
class NotNative:
    """A node for which Korch has no kernel."""

    operator: str  # its type
    node: str  # its type and name
    engine: str  # what runs it
    reason: str  # why there is no kernel


@dataclass
class Forecast:
    """What an optimization of a model would do, at the largest sizes if there are ranges of sizes."""

    model: str  # its name
    isa: str  # the instruction set
    threads: int  # the threads of the executable
    native: int = 0  # the number of operators that kernels of Korch's run, after constants are folded
    library: list[NotNative] = field(default_factory=list)  # operators that kernels of a library run within a plan
    host: list[NotNative] = field(default_factory=list)  # nodes that the host runs between plans
    budget_s: int = 0  # the least sufficient budget, from the start of the command
    least: list[Least] = field(default_factory=list)  # what each plan needs of it
    weights_bytes: int = 0  # bytes of the weights
    values_bytes: int = 0  # the most bytes that one primitive reads and writes, without weights
    advice: list[str] = field(default_factory=list)  # what is assumed, and what would help

    def to_text(self) -> str:
        """Return the forecast as text."""
        counts = f"{self.native} native, {len(self.library)} of a library, {len(self.host)} on the host"
        lines = [f"{self.model}: {counts} ({self.isa}, {counted(self.threads, 'thread')})"]
        lines += [f"library: {line}" for line in _lines(self.library)]
        lines += [f"host: {line}" for line in _lines(self.host)]
        if self.least:
            search_s, compile_s, end_s = map(sum, zip(*map(astuple, self.least), strict=True))
            parts = f"{search_s:.0f} to find a plan by estimates, {compile_s:.0f} to compile its kernels, {end_s:.0f}"
            lines.append(f"least budget: {self.budget_s} s ({parts} to build and check it)")
            weights, values = size_text(self.weights_bytes), size_text(self.values_bytes)
            lines.append(f"memory: {weights} of weights; one primitive reads and writes up to {values} of other values")
        return "\n".join(lines + [f"note: {line}" for line in self.advice])


def forecasts(
    model: ModelSource, options: Options, bindings: Sequence[Binding], begun_s: float | None = None
) -> list[Forecast]:
    """Return what an optimization of an ONNX model for the CPU would do, for each binding.

    `bindings`: each has shapes by input name and sizes by dimension name. `begun_s`: when the budget begins.

    Raises:
        KorchError: the optimization would refuse the model; the message is the same.
    """
    begun_s = time.monotonic() if begun_s is None else begun_s
    if len(bindings) == 1:
        found = [_assumed(model, options, bindings[0])]
    else:
        found = [_static(model, options, static(binding)) for binding in bindings]
        if any(one.host for one in found):
            raise several_with_host()
    for one in found:
        one.budget_s = math.ceil(sum(plan.total_s for plan in one.least) + time.monotonic() - begun_s)
    return found


def _stateful(model: LoadedModel, options: Options, binding: Binding) -> Forecast | None:
    """Return the forecast of a model with states, for sessions; None of another model, and for fixed rows."""
    sizes = state_sizes(model, binding)
    if sizes is None:
        return None
    plans = list[Forecast]()
    for rows, source in step_sources(sizes).items():
        total = source.dimensions[0].high
        plans.append(Forecast("", target_of(options).isa, options.threads))
        run = Run(options, {}, untold, sizes.load(rows or total, total - rows if rows else 0))
        _add_plan(plans[-1], run, source.dimensions)
        if not has_time_for_each(source, options, Deadline()):
            source.masked((total,))
    found = plans[0]
    found.least = [least for plan in plans for least in plan.least]
    found.values_bytes = max(plan.values_bytes for plan in plans)
    found.advice += [sizes.text] if sizes.text else []
    return found


def _assumed(model: ModelSource, options: Options, binding: Binding) -> Forecast:
    """Return the forecast for one binding; sizes that it leaves open are assumed as by an optimization."""
    if has_range(binding) and (found := _stateful(read_model(model), options, binding)):
        return found
    with suppress(UnknownSizeError):
        if not is_open(binding):
            return _bound(model, options, binding)
    loaded = read_model(model)
    if found := _stateful(loaded, options, binding):
        return found
    sizes, advice = assumed(loaded.declared, binding), list[str]()
    try:
        found = _bound(model, options, {**binding, **sizes})
    except (UnsupportedError, ModelError) as error:
        sizes, advice = fixed(sizes), [f"the model is optimized for one size of each dimension: {error}"]
        found = _bound(model, options, {**binding, **sizes})
    found.advice += [*advice, *([assumed_text(sizes)] if sizes else [])]
    return found


def _bound(model: ModelSource, options: Options, binding: Binding) -> Forecast:
    """Return the forecast for sizes and ranges of sizes."""
    dimensions = dimensions_of(binding)
    largest = tuple(dimension.high for dimension in dimensions)
    found = _static(model, options, binding_of(binding, largest), dimensions)
    if dimensions and found.host:
        raise no_ranges(f"{found.host[0].node}: {found.host[0].reason}")
    if dimensions:
        source = onnx_source(model, binding)
        if not has_time_for_each(source, options, Deadline()):
            source.masked(largest)
    return found


def _static(
    model: ModelSource, options: Options, shapes: Mapping[str, tuple[int, ...]], ranges: tuple[Dimension, ...] = ()
) -> Forecast:
    """Return the forecast for fixed sizes; these are the largest of `ranges`."""
    target, advice = target_of(options), list[str]()
    run = Run(options, shapes, untold, model)
    try:
        found = Forecast("", target.isa, options.threads)
        if graph := _add_plan(found, run, ranges):
            found.advice += [line for line in _faster(graph, target) if not (ranges and "--error" in line)]
            return found
    except UnsupportedError as error:
        if ranges:
            raise
        advice.append(f"it is no single graph of static tensors: {error}")
    segmented, engines = split_for_host(model, options, shapes, {})
    found = Forecast(segmented.name, target.isa, options.threads, advice=advice)
    for segment, engine in zip(segmented.segments, engines, strict=True):
        if not isinstance(segment, HostSegment):
            _add_plan(found, Run(options, {}, run.progress, segment))
        elif engine is not None:
            own = zip(segment.model.graph.node, segment.nodes, strict=True)
            found.host += [NotNative(node.op_type, label, engine.name, reason) for node, (label, reason) in own]
            if engine.refusal == NOT_INSTALLED and not any("pip" in line for line in advice):
                advice.append(f"ONNX Runtime may run the host's nodes faster: {install_command('onnxruntime')}")
    return found


def _add_plan(found: Forecast, run: Run, ranges: tuple[Dimension, ...] = ()) -> PrimitiveGraph | None:
    """Add what a graph of static tensors needs; return its primitives, or None if no provider runs one of them."""
    with run.resources:
        run_until(run, "fission")
        operators, split = run.results["frontend"], run.results["fission"]
        with run.stage("reference"):
            check_memory(split.graph)
    graph, providers_of = split.graph, kernel_providers(run.options)
    whole = {item.operator: item for item in split.kept}
    library = list[NotNative]()
    for p, (primitive, origin) in enumerate(zip(graph.primitives, graph.origins, strict=True)):
        if primitive.op != "opaque":
            continue
        providers = providers_of(make_group(graph, [p], [primitive.output]))
        if not providers:
            return None
        if all(providers.values()) and (item := whole.pop(origin, None)):
            library.append(NotNative(item.op_type, item.operator, ", ".join(providers), item.reason))
    work = work_of(graph)
    shares = compared_shares(ranges, work, run.options, Deadline()) if ranges else ()
    found.least.append(least_of(work, run.options, shares))
    found.model = found.model or operators.name
    found.native += len(operators.operators) - len(library)
    found.library += library
    found.weights_bytes += work.weights_bytes
    used = ({*p.inputs, p.output} - graph.constants.keys() for p in graph.primitives)
    values_bytes = (sum(graph.types[value].size_bytes for value in values) for values in used)
    found.values_bytes = max(found.values_bytes, *values_bytes, 0)
    return graph


def _faster(graph: PrimitiveGraph, target: Target) -> Iterator[str]:
    """Yield what may make a plan faster, or why it is slow on this CPU."""
    types = {type_.dtype for type_ in graph.types}
    if is_quantized(graph) and not target.has_dot:
        yield f"it is quantized, and {target.isa} has no sums of products of bytes: its float model may be faster"
    elif types & {DType.F16, DType.BF16} and target.isa not in OF_COMPONENTS:
        yield f"{target.isa} has no products of 16-bit floats: they are computed in float32"
    elif graph.linear and types.isdisjoint((*NARROW, DType.F16, DType.BF16, DType.F64)):
        yield "with --error 1e-2, products may compute in fewer bits, within that error of the outputs: often faster"


def _lines(nodes: Sequence[NotNative]) -> Iterator[str]:
    """Yield a line for the nodes of each operator, engine and reason."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for item in nodes:
        groups.setdefault((item.operator, item.engine, item.reason), []).append(item.node)
    for (_, engine, reason), names in groups.items():
        more = f" and {len(names) - MOST_NODES} more" * (len(names) > MOST_NODES)
        yield f"{', '.join(names[:MOST_NODES])}{more}: {engine} ({reason})"
