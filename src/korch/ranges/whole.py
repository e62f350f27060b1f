"""The rules of operators that are not split (`free.py` has those of other primitives)."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import onnx

from korch.primitive.definitions import OPSET
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.types import DType, ValueId, ValueType
from korch.primitive.verbs import lit
from korch.ranges.form import Axis, Factor, axis_of, is_free
from korch.ranges.mask import Value, identity_of, plain
from korch.ranges.site import Site, fixed, result_of


def whole(site: Site) -> Value:
    """Return the result of an operator that is not split."""
    attributes = site.attributes_as(OpaqueAttributes)
    if (same := _same_for_all_sizes(site)) is not None:
        return same
    node = onnx.NodeProto.FromString(bytes.fromhex(attributes.node))
    if not attributes.domain and node.op_type in _PARALLEL:
        return _parallel(site, attributes, node)
    rule = None if attributes.domain else _RULES.get(attributes.op_type)
    if rule is None:
        raise site.refusal(f"{attributes.op_type} has no rule for ranges of sizes")
    return rule(site, {item.name: item.i for item in node.attribute} | {OPSET: attributes.opset})


def _same_for_all_sizes(site: Site) -> Value | None:
    """Return the result of a primitive that does not depend on the sizes; None if it does."""
    is_free_here = any(is_free(axis) for value in site.operands for axis in value.form)
    if is_free_here or not all(fixed(vector) for shape in (*site.inputs, site.output) for vector in shape):
        return None
    site.same_attributes()
    return result_of(site, [axis_of([Factor(vector[0])]) for vector in site.output])


def _parallel(site: Site, attributes: OpaqueAttributes, node: onnx.NodeProto) -> Value:
    """Return the result of an operator that computes the elements along some axes independently.

    Elements beyond the valid ones are replaced by 0 in all inputs but the first: they may be no legal indices.
    """
    inputs, outputs = _PARALLEL[node.op_type]
    axes: dict[str, Axis] = {}
    for k, letters in enumerate(part for name, part in zip(node.input, inputs.split(), strict=False) if name):
        for axis in range(len(site.inputs[k])):
            factors, letter = site.factors(k, axis), letters[axis : axis + 1].strip(".")
            if letter:
                axes[letter] = site.join(axes.get(letter), factors)
            elif is_free(factors):
                raise site.refusal(f"{node.op_type} combines elements along axis {axis} of operand {k}")
        if k > 0:
            site.mask(k, range(len(site.inputs[k])), 0)
    letters = outputs.split()[attributes.output].ljust(len(site.output), ".")
    fixed_axes = [axis_of([Factor(vector[0])]) for vector in site.output]
    form = tuple(axes.get(letter, axis) for letter, axis in zip(letters, fixed_axes, strict=False))
    if "t" not in axes or not is_free(axes["t"]):
        return result_of(site, form)
    site.check(form)
    return plain(_within_steps(site, attributes, node), form)


def _within_steps(site: Site, attributes: OpaqueAttributes, node: onnx.NodeProto) -> ValueId:
    """Add a recurrence that ends after the valid steps: their number becomes an input, if none was given."""
    verbs, operands = site.masks.verbs, [value.id for value in site.operands]
    names = [*node.input, *[""] * (5 - len(node.input))]
    if not names[4]:
        lengths = ValueType((verbs.shape(operands[0])[1],), DType.I32)
        steps = site.masks.count(site.multiple(site.factors(0, 0), 1), lengths)
        operands.insert(sum(map(bool, names[:4])), steps)
        names[4] = "lengths"
    given = itertools.count()
    node.input[:] = [f"x{next(given)}" if name else "" for name in names]
    types, text = map(str, map(verbs.builder.type, operands)), node.SerializeToString(deterministic=True).hex()
    return verbs.add("opaque", *operands, attributes=replace(attributes, node=text, inputs=tuple(types)))


def _top(site: Site, given: Mapping[str, int]) -> Value:
    """Return the result of TopK; a number of elements that depends on the size must be that of all elements."""
    axis = given.get("axis", -1) % len(site.inputs[0])
    dtype = site.dtype(0)
    if given.get("largest", 1):
        last = identity_of("reduce_max", dtype)
    elif axis == len(site.inputs[0]) - 1 and dtype in (DType.F32, DType.F64):
        last = math.nan  # greater than infinity; ONNX Runtime, which runs the others, has no order with NaN
    else:
        last = identity_of("reduce_min", dtype)
    site.mask(0, (axis,), last)
    own = axis_of([Factor(site.output[axis][0])])
    if not fixed(site.output[axis]):
        own = site.factors(0, axis)
        if site.output[axis] != site.inputs[0][axis]:
            raise site.refusal("it takes a part of the elements, of which the number depends on the size")
        site.operands[1] = plain(site.masks.verbs.constant(site.step.operands[1].constants[0].array), ((),))
    return result_of(site, [own if i == axis else a for i, a in enumerate(site.operands[0].form)])


def _hardmax(site: Site, given: Mapping[str, int]) -> Value:
    rank, is_old = len(site.inputs[0]), given[OPSET] < 13
    axis = given.get("axis", 1 if is_old else -1) % rank
    site.mask(0, range(axis, rank) if is_old else (axis,), identity_of("reduce_max", site.dtype(0)))
    return result_of(site, site.operands[0].form)


def _indexed_axis(site: Site, given: Mapping[str, int]) -> int:
    """Return the axis of indices; those that are not valid are replaced by 0, negative ones count from a free end."""
    axis = given.get("axis", 0) % len(site.inputs[0])
    site.mask(1, range(len(site.inputs[1])), 0)
    factors, index = site.factors(0, axis), site.operands[1]
    if is_free(factors):
        verbs = site.masks.verbs
        count = site.masks.count(site.multiple(factors, 1), verbs.builder.type(index.id))
        is_negative, wrapped = verbs.elementwise("less", index.id, lit(0)), verbs.add("add", index.id, count)
        site.operands[1] = plain(verbs.add("where", is_negative, wrapped, index.id), index.form)
    return axis


def _gather(site: Site, given: Mapping[str, int]) -> Value:
    axis = _indexed_axis(site, given)
    data, indices = site.operands
    return result_of(site, (*data.form[:axis], *indices.form, *data.form[axis + 1 :]))


def _elements_axis(site: Site, given: Mapping[str, int]) -> int:
    """Return the axis of indices of single elements; along the other axes, all operands must depend on the same."""
    axis = _indexed_axis(site, given)
    for i in range(len(site.inputs[0])):
        factors = [site.factors(k, i) for k in range(len(site.operands))]
        if i != axis and any(map(is_free, factors)) and len(set(factors)) > 1:
            raise site.refusal("its indices depend on the size in another way than its elements")
    return axis


def _gather_elements(site: Site, given: Mapping[str, int]) -> Value:
    _elements_axis(site, given)
    return result_of(site, site.operands[1].form)


def _scatter_elements(site: Site, given: Mapping[str, int]) -> Value:
    if is_free(site.factors(1, _elements_axis(site, given))):
        raise site.refusal("the number of its indices along their axis depends on the size")
    return result_of(site, site.operands[0].form)


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
    "Hardmax": _hardmax,
    "ScatterElements": _scatter_elements,
    "TopK": _top,
    "CumSum": _running(0),
    "CumProd": _running(1),
}
"""The rule of each operator, as a function of its integer attributes and its version."""

_PARALLEL = {
    "GRU": ("tb . . . b .b", "t.b .b"),
    "GridSample": ("nc nzyx", "nczyx"),
    "LSTM": ("tb . . . b .b .b .", "t.b .b .b"),
    "LpPool": ("nc", "nc"),
    "MaxPool": ("n", "n n"),
    "RNN": ("tb . . . b .b", "t.b .b"),
    "RoiAlign": ("nc r r", "rc"),
}
"""For each input and output, letters of the axes along which the operator computes independently (`_parallel`)."""
