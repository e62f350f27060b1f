"""Model -> executable in which the host runs the parts that are not graphs of static tensors."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from korch.backend import opaque_refusals
from korch.candidate.candidate import make_group
from korch.cuda.measure.device import require_torch
from korch.errors import KorchError, UnprovidedError, UnsupportedError
from korch.fission import fission, fission_with_report
from korch.frontend.onnx import load_segments
from korch.frontend.operator import OperatorGraph
from korch.frontend.segments import HostSegment, SegmentedModel
from korch.host.check import SegmentValues
from korch.host.engine import HostEngine
from korch.host.executable import HostedExecutable, HostPart, NativePart, Part
from korch.options import Options
from korch.pipeline import Progress, Update, optimize_model, untold
from korch.primitive.dispute import noted_disputes
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.runtime.build import model_record
from korch.runtime.record import HostNodeRecord, ModelRecord
from korch.runtime.report import HostedReport
from korch.system.deadline import Deadline

logger = logging.getLogger("korch.host")

CHECK_SHARE = 0.1
"""The part of the remaining time after which each reference of a node is given up."""


def optimize_with_host(
    model: Any,
    options: Options,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> HostedExecutable:
    """Optimize the parts of a model that are graphs of static tensors; leave the rest to the host.

    `shapes`: sizes for inputs with unknown dimensions, by input name. `deadline`: the time at which the artifact must
    be on disk; by default the end of the budget, counted from now.

    Raises:
        KorchError: the model, an option or the machine is not suitable; the message says what to do.
    """
    if options.error:
        raise UnsupportedError(
            "less precise types are for models that are one graph of static tensors",
            where="option error",
            expected="no operators for the host, and no --error otherwise",
        )
    if options.is_cuda:
        require_torch()  # if the host runs all segments, no later step checks for it
    tell = progress or untold
    begun_s = time.monotonic()
    deadline = deadline or Deadline.after(options.budget_s, begun_s)
    host: dict[str, str] = {}
    source = model_record(model) if isinstance(model, str | Path) else ModelRecord()
    while True:
        with noted_disputes() as disputes:
            segmented, engines = split_for_host(model, options, shapes, host)
            try:
                parts, hosted = _build(segmented, engines, options, tell, deadline)
                break
            except _CannotRunError as error:
                _leave(host, error.nodes, segmented.name)
    segments = tuple(part.executable.report for part in parts if isinstance(part, NativePart))
    of_segments = {dispute for segment in segments for dispute in segment.disputes}
    report = HostedReport(
        hosted,
        segments,
        tuple(dispute for dispute in disputes.values() if dispute not in of_segments),
        seconds=time.monotonic() - begun_s,
        model=source.with_defaults(segmented.defaults),
    )
    return HostedExecutable(segmented.inputs, segmented.outputs, parts, segmented.constants, options.threads, report)


def split_for_host(
    model: Any, options: Options, shapes: Mapping[str, tuple[int, ...]] | None, host: dict[str, str]
) -> tuple[SegmentedModel, list[HostEngine | None]]:
    """Return a model as segments of which a provider or the host runs each operator, and the engines of the host's.

    `host`: names of nodes that the host must run, with the reasons; those that no provider runs are added.

    Raises:
        KorchError: as `load_segments`, or no engine runs a node.
    """
    while True:
        segmented = load_segments(model, shapes, host)
        refused = _refused(segmented, options)
        if not refused:
            # Engines are opened before the search, which may take hours, so that what no engine runs is refused early.
            return segmented, [
                HostEngine(segment.model, options.threads) if isinstance(segment, HostSegment) else None
                for segment in segmented.segments
            ]
        _leave(host, refused, segmented.name)


def several_with_host() -> UnsupportedError:
    """Return the error for several bindings of a model of which the host runs a part."""
    return UnsupportedError(
        "a part of the model runs on the host, so it can't have several bindings yet",
        where="option --shape",
        hint="Build an artifact for each binding",
    )


def _leave(host: dict[str, str], refused: Mapping[str, str], name: str) -> None:
    """Add nodes that no provider runs to those of the host, which does not have all of them yet."""
    if not refused.keys() - host.keys():
        raise UnsupportedError(
            "neither Korch nor the host runs these nodes: " + "; ".join(f"{n}: {r}" for n, r in refused.items()),
            where=name,
            hint="Replace them in the model, or cut the model before them",
        )
    host |= refused


class _CannotRunError(Exception):
    """Nodes that no provider runs, with the reasons."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        super().__init__(nodes)
        self.nodes = dict(nodes)


def _build(
    segmented: SegmentedModel,
    engines: Sequence[HostEngine | None],
    options: Options,
    tell: Progress,
    deadline: Deadline,
) -> tuple[list[Part], tuple[HostNodeRecord, ...]]:
    parts: list[Part] = []
    hosted: list[HostNodeRecord] = []
    values = SegmentValues(segmented, options)
    left = sum(not isinstance(segment, HostSegment) for segment in segmented.segments)
    for segment, engine in zip(segmented.segments, engines, strict=True):
        if isinstance(segment, HostSegment):
            if engine is None:
                raise AssertionError("a host segment has no engine")
            engine, checked = values.check(engine, segment.model, deadline.less(1 - CHECK_SHARE).left_s)
            parts.append(HostPart(segment.model, engine, segment.nodes))
            for (node, reason), text in zip(segment.nodes, checked, strict=True):
                hosted.append(HostNodeRecord(node, reason, engine.name, text))
                tell(Update("host", f"{engine.name} runs {node}: {reason} ({text})"))
            continue
        number = sum(isinstance(part, NativePart) for part in parts)
        own = replace(options.for_search(number, "part"), inputs=values.given(segment.inputs))
        try:
            executable = optimize_model(segment, own, None, tell, deadline.shared(left))
            left -= 1
        except UnprovidedError as error:
            raise _CannotRunError(_blamed(segment, error, options)) from error
        native = NativePart(executable, segment.inputs, segment.outputs)
        parts.append(native)
        values.run(native)
    return parts, tuple(hosted)


def _refused(segmented: SegmentedModel, options: Options) -> dict[str, str]:
    """Return the operators that fission keeps opaque and no provider of the target runs, with the reasons."""
    refusal_of = opaque_refusals(options)
    refused: dict[str, str] = {}
    for segment in segmented.segments:
        if isinstance(segment, HostSegment):
            continue
        graph = fission(segment, with_loops=not options.is_cuda)
        for number, (primitive, origin) in enumerate(zip(graph.primitives, graph.origins, strict=True)):
            if isinstance(primitive.attributes, OpaqueAttributes):
                refusal = refusal_of(make_group(graph, [number], [primitive.output]))
                if refusal:
                    refused |= dict.fromkeys(_named(segment, origin), refusal)
    return refused


def _named(segment: OperatorGraph, origin: str) -> list[str]:
    """Return the names of the operators whose label is a prefix of an origin."""
    return [o.name for o in segment.operators if o.label and origin.startswith(o.label)]


def _blamed(segment: OperatorGraph, error: KorchError, options: Options) -> dict[str, str]:
    """Return the nodes of a segment that an error names; if it names none, the opaque nodes, or else all nodes."""
    named = _named(segment, error.where.removeprefix("node "))
    report = fission_with_report(segment, with_loops=not options.is_cuda)[1]
    kept = {item.operator for item in report.kept}
    opaque = [operator.name for operator in segment.operators if operator.label in kept]
    names = named or opaque or [operator.name for operator in segment.operators]
    logger.info("left to the host: %s: %s", ", ".join(names), error)
    return dict.fromkeys(names, error.what)
