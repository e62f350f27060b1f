"""The rules of operators that are not split (`free.py` has those of other primitives)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from korch.primitive.ops.opaque import OpaqueAttributes
from korch.ranges.form import Factor, axis_of, is_free
from korch.ranges.mask import Value
from korch.ranges.site import Site, fixed, result_of


def whole(site: Site) -> Value:
    """Return the result of an operator that is not split."""
    attributes = site.attributes_as(OpaqueAttributes)
    if (same := _same_for_all_sizes(site)) is not None:
        return same
    rule = None if attributes.domain else _RULES.get(attributes.op_type)
    if rule is None:
        raise site.refusal(f"{attributes.op_type} has no rule for ranges of sizes")
    node = onnx.NodeProto.FromString(bytes.fromhex(attributes.node))
    return rule(site, {item.name: item.i for item in node.attribute})


def loop(site: Site) -> Value:
    """Return the result of a loop that does not depend on the sizes."""
    same = _same_for_all_sizes(site)
    if same is None:
        raise site.refusal("a loop has no rule for ranges of sizes")
    return same


def _same_for_all_sizes(site: Site) -> Value | None:
    """Return the result of a primitive that does not depend on the sizes; None if it does."""
    is_free_here = any(is_free(axis) for value in site.operands for axis in value.form)
    if is_free_here or not all(fixed(vector) for shape in (*site.inputs, site.output) for vector in shape):
        return None
    site.same_attributes()
    return result_of(site, [axis_of([Factor(vector[0])]) for vector in site.output])


def _indexed_axis(site: Site, given: Mapping[str, int]) -> int:
    """Return the axis of indices, which must not be free; indices that are not valid are replaced by 0."""
    axis = given.get("axis", 0) % len(site.inputs[0])
    if len(site.operands) != 2 or is_free(site.factors(0, axis)) or not fixed(site.inputs[0][axis]):
        raise site.refusal("indices into a free axis are computed at run time")
    site.mask(1, range(len(site.inputs[1])), 0)
    return axis


def _gather(site: Site, given: Mapping[str, int]) -> Value:
    axis = _indexed_axis(site, given)
    data, indices = site.operands
    return result_of(site, (*data.form[:axis], *indices.form, *data.form[axis + 1 :]))


def _gather_elements(site: Site, given: Mapping[str, int]) -> Value:
    axis = _indexed_axis(site, given)
    for i in range(len(site.inputs[0])):
        factors = [site.factors(k, i) for k in (0, 1)]
        if i != axis and any(map(is_free, factors)) and factors[0] != factors[1]:
            raise site.refusal("its indices depend on the size in another way than its elements")
    return result_of(site, site.operands[1].form)


def _running(first: int) -> Callable[[Site, Mapping[str, int]], Value]:
    def running(site: Site, given: Mapping[str, int]) -> Value:
        axes = {int(constant.array.reshape(-1)[0]) for constant in site.step.operands[1].constants}
        if len(axes) != 1:
            raise site.refusal("its axis depends on the size or is computed at run time")
        if given.get("reverse", 0):
            site.mask(0, (axes.pop() % len(site.inputs[0]),), first)
        return result_of(site, site.operands[0].form)

    return running


_RULES: dict[str, Callable[[Site, Mapping[str, int]], Value]] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "CumSum": _running(0),
    "CumProd": _running(1),
}
"""The rule of each operator, as a function of its integer attributes."""
