"""The rule of loops: the number of iterations may be free, and so may be axes within an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from korch.primitive.ops.loop import COUNT, LoopAttributes
from korch.primitive.reference import body_of
from korch.primitive.text import format_graph
from korch.primitive.types import ValueType
from korch.ranges.form import Axis, Form, is_free
from korch.ranges.mask import Value, plain
from korch.ranges.site import Site


def loop(site: Site) -> Value:
    """Return the result of a loop, which counts its iterations if the slices of its inputs are along a free axis."""
    own = site.attributes_as(LoopAttributes)
    first = own.states + len(own.reads_backward)
    steps: Axis = None
    for k in range(own.states, first):
        steps = site.join(steps, site.factors(k, 0))
    if steps is None and len({a.trips for a in site.step.attributes if isinstance(a, LoopAttributes)}) > 1:
        raise site.refusal("its number of iterations depends on the size, and it reads no slices")
    given = [
        tuple(site.factors(k, axis) for axis in range(own.states <= k < first, len(shape)))
        for k, shape in enumerate(site.inputs)
    ]
    body, form = _iteration(site, own, given)
    attributes, operands = replace(own, body=body), [value.id for value in site.operands]
    if is_free(steps):
        operands.append(site.masks.count(site.multiple(steps or (), 1), ValueType.parse(COUNT)))
        attributes = replace(attributes, inputs=(*own.inputs, COUNT), is_counted=True)
    form = form if own.output < own.states else (steps, *form)
    site.check(form)
    return plain(site.masks.verbs.add("loop", *operands, attributes=attributes), form)


def _iteration(site: Site, own: LoopAttributes, given: Sequence[Form]) -> tuple[str, Form]:
    """Return the body of a loop for all sizes, and the form of its result in one iteration.

    `given`: the forms of the inputs of an iteration.
    """
    from korch.ranges.masked import masked_samples  # it imports the rules

    loops = [a for a in site.step.attributes if isinstance(a, LoopAttributes)]
    if len({(a.states, a.reads_backward, a.writes_backward, a.output) for a in loops}) > 1:
        raise site.refusal("its attributes depend on the size")
    found = masked_samples(replace(site.samples, graphs=tuple(body_of(a.body) for a in loops)))
    inputs, outputs = found.plan.inputs, found.plan.outputs
    if [*inputs] != given or inputs[: own.states] != outputs[: own.states]:
        raise site.refusal("an iteration depends on the size in another way than the loop")
    if len(found.plan.hidden) > 1:
        raise site.refusal("an iteration combines elements along a free axis")
    graph = replace(found.graph, inputs=found.graph.inputs[:-1])  # without the hidden sizes
    return format_graph(graph), outputs[own.output]
