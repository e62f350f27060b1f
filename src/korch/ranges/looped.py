"""The rule of loops: the number of iterations may be free, and so may be axes within an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from korch.primitive.ops.loop import COUNT, LoopAttributes
from korch.primitive.text import format_graph
from korch.primitive.types import DType, ValueType
from korch.ranges.form import SIZES, Axis, Form, Hidden, is_free
from korch.ranges.mask import Value, plain
from korch.ranges.site import Site, fixed

if TYPE_CHECKING:
    from korch.ranges.masked import Masked


def loop(site: Site) -> Value:
    """Return the result of a loop, which counts its iterations if the slices of its inputs are along a free axis."""
    own = site.attributes_as(LoopAttributes)
    first = own.states + len(own.reads_backward)
    steps: Axis = None
    for k in range(own.states, first):
        steps = site.join(steps, site.factors(k, 0))
    if steps is None and len({a.trips for a in site.step.attributes if isinstance(a, LoopAttributes)}) > 1:
        raise site.refusal("its number of iterations depends on the size, and it reads no slices")
    given: list[Form] = [
        tuple(
            axis if k < own.states and axis is None and not fixed(vector) else site.factors(k, i)
            for i, (axis, vector) in enumerate(zip(site.operands[k].form, shape, strict=True))
        )[own.states <= k < first :]
        for k, shape in enumerate(site.inputs)
    ]
    if any(axis is None for form in given for axis in form):  # a state begins as a constant, and is then as it becomes
        made = _part(site, given).plan.outputs
        for k in range(own.states):
            given[k] = tuple(b if a is None else a for a, b in zip(given[k], made[k], strict=True))
    body, form, hidden = _iteration(site, own, given)
    types = tuple(str(ValueType(h.shape, DType(h.dtype))) for h in hidden)
    operands = [*(value.id for value in site.operands), *(site.masks.input(h) for h in hidden)]
    attributes = replace(own, body=body, inputs=(*own.inputs, *types))
    if is_free(steps):
        count = site.multiple(steps or (), 1)
        if count.at([d.low for d in site.samples.dimensions]) < 1:
            raise site.refusal("it has no iteration at the smallest size")
        operands.append(site.masks.count(count, ValueType.parse(COUNT)))
        attributes = replace(attributes, inputs=(*attributes.inputs, COUNT), is_counted=True)
    form = form if own.output < own.states else (steps, *form)
    site.check(form)
    return plain(site.masks.verbs.add("loop", *operands, attributes=attributes), form)


def _iteration(site: Site, own: LoopAttributes, given: Sequence[Form]) -> tuple[str, Form, list[Hidden]]:
    """Return the body of a loop for all sizes, the form of its result in one iteration, and its hidden inputs.

    `given`: the forms of the inputs of an iteration.
    """
    found = _part(site, given)
    if found.plan.inputs[: own.states] != found.plan.outputs[: own.states]:
        raise site.refusal("the form of a state depends on the iteration")
    inputs = [given for given in found.graph.inputs if given[0] != SIZES]
    named = tuple((f"i{i}", value) for i, (_, value) in enumerate(inputs))
    hidden = [h for h in found.plan.hidden if h.name != SIZES]
    return format_graph(replace(found.graph, inputs=named)), found.plan.outputs[own.output], hidden


def _part(site: Site, given: Sequence[Form]) -> Masked:
    """Return an iteration for all sizes; `given` as for `_iteration`."""
    from korch.ranges.masked import iterations_in, masked_part  # it imports the rules

    loops = [a for a in site.step.attributes if isinstance(a, LoopAttributes)]
    if len({(a.states, a.reads_backward, a.writes_backward, a.output) for a in loops}) > 1:
        raise site.refusal("its attributes depend on the size")
    return masked_part(iterations_in(site.samples, loops), given, site.known)
