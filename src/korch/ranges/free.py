"""A primitive in all samples -> its value in a graph for all sizes: one rule for each kind of primitive.

A rule returns the form of the result and what is known beyond its valid elements. If a primitive combines elements
along a free axis, its rule requests masks for its operands: beyond the valid elements a sum needs 0, a maximum -inf,
and so on. These are identities of the operation, so the valid elements of the result equal the model's. In a
contraction both operands are masked, because 0 · NaN is not 0, unless one is known to be finite.

Softmax: its maximum m is computed with -inf beyond the valid elements of x, so x - m is -inf there and its exponential
is 0. Only if m is infinite or NaN, it is NaN instead; then valid elements are NaN, too, and so is the sum over the
line (`Fill.is_soft`).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from korch.errors import UnsupportedError
from korch.primitive.graph import Primitive
from korch.primitive.op import Category
from korch.primitive.ops import OPS
from korch.primitive.ops.gathered import GATHERED
from korch.primitive.ops.layout import ConcatAttributes, TransposeAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.ops.state import WRITE_ROWS, WriteAttributes
from korch.primitive.types import DType
from korch.ranges.chosen import pad, part, take
from korch.ranges.form import Axis, Factor, axis_of, is_free, prefix
from korch.ranges.looped import loop
from korch.ranges.mask import DEQUANTIZES, Fill, Value, identity_of
from korch.ranges.site import Site, fixed, result_of
from korch.ranges.whole import whole
from korch.ranges.windows import conv, pool

Rule = Callable[[Site], Value]

PROPAGATES_NAN = frozenset({"exp", "cast", "mul", "div", "neg"})
"""The operations whose result has a soft fill if an operand has one (`Fill.is_soft`)."""


def rule_of(op: str, category: Category) -> Rule | None:
    """Return the rule of an operation; None if it has none."""
    return _elementwise if category is Category.ELEMENTWISE else RULES.get(op)


def _elementwise(site: Site) -> Value:
    site.same_attributes()
    form: list[Axis] = [None] * len(site.output)
    for value in site.operands:
        form = [site.join(a, b) for a, b in zip(form, value.form, strict=True)]
    fills = [_elementwise_fill(site, axis) if is_free(form[axis]) else None for axis in range(len(form))]
    result = result_of(site, form, fills)
    computed = [v for v in site.operands if site.masks.verbs.builder.constant_of(v.id) is None]
    if site.step.op in DEQUANTIZES and len(computed) == 1:
        _note_maker(site, result, computed[0])
    if site.step.op == "isnan":
        return Value(result.id, result.form, result.fills, ("isnan", site.operands[0].id))
    return result


def _number(site: Site, k: int, axis: int) -> Fill | None:
    """Return the number of all elements of an operand beyond the valid ones along an axis; None if unknown."""
    constant = site.masks.verbs.builder.constant_of(site.operands[k].id)
    if constant is not None:
        return Fill(constant.scalar) if constant.is_uniform else None
    return site.fill(k, axis)


def _elementwise_fill(site: Site, axis: int) -> Fill | None:
    op, operands = site.step.op, site.operands
    numbers = [_number(site, k, axis) for k in range(len(operands))]
    if len(operands) == 2 and (fill := numbers[0]) is not None and numbers[1] is None:
        of = operands[1].part
        if op == "sub" and of == ("reduce_max", operands[0].id) and fill.number == -np.inf:
            return Fill(fill.number, is_soft=True)
        if op == "div" and of == ("reduce_sum", operands[0].id) and fill.number == 0:
            return Fill(0.0, is_soft=True)
    if op == "where":
        return _choice_fill(site, numbers)
    known = [number for number in numbers if number is not None]
    if op == "mul" and len(known) == 1 and known[0].number == 0:
        return known[0] if _is_finite(site, numbers.index(None)) else None
    is_soft = any(number.is_soft for number in known)
    if len(known) < len(numbers) or (is_soft and op not in PROPAGATES_NAN):
        return None
    arrays = [np.asarray(n.number).astype(site.dtype(k).numpy) for k, n in enumerate(known)]
    found = OPS[op].reference(arrays, site.attributes)
    return None if found != found else Fill(found.item(), is_soft)


def _choice_fill(site: Site, numbers: Sequence[Fill | None]) -> Fill | None:
    condition, first, second = numbers
    if first is not None and second is not None and first.number == second.number:
        # In a guarded softmax, NaN is replaced by the number that is beyond the valid elements of the other lines.
        is_guard = site.operands[0].part == ("isnan", site.operands[2].id)
        return Fill(second.number) if is_guard or not (first.is_soft or second.is_soft) else None
    chosen = None if condition is None or condition.is_soft else (first if condition.number else second)
    return chosen if chosen is not None and not chosen.is_soft else None


def _is_finite(site: Site, k: int) -> bool:
    """Return whether an operand is a constant without infinities and NaN."""
    constant = site.masks.verbs.builder.constant_of(site.operands[k].id)
    return constant is not None and bool(np.isfinite(np.asarray(constant.array, np.float64)).all())


def _broadcast(site: Site) -> Value:
    value, lead = site.operands[0], len(site.output) - len(site.inputs[0])
    form: list[Axis] = []
    fills: list[Fill | None] = []
    for axis, vector in enumerate(site.output):
        given = site.inputs[0][axis - lead] if axis >= lead else None
        is_kept = given is not None and given == vector
        if given is not None and not is_kept and set(given) != {1}:
            raise site.refusal(f"axis {axis - lead} is broadcast at some of the sizes only")
        form.append(value.form[axis - lead] if is_kept else None)
        fills.append(value.fills[axis - lead] if is_kept else None)
    result = result_of(site, form, fills)
    return Value(result.id, result.form, result.fills, value.part)


def _transpose(site: Site) -> Value:
    site.same_attributes()
    (value,), attributes = site.operands, site.attributes_as(TransposeAttributes)
    return _moved(site, [value.form[axis] for axis in attributes.perm], [value.fills[axis] for axis in attributes.perm])


def _moved(site: Site, form: Sequence[Axis], fills: Sequence[Fill | None]) -> Value:
    """Return the result of a transpose or reshape, recorded so that a mask can be put before this primitive."""
    result = result_of(site, form, fills)
    _note_maker(site, result, site.operands[0])
    return result


def _note_maker(site: Site, result: Value, source: Value) -> None:
    primitive = Primitive(site.step.op, tuple(v.id for v in site.operands), site.attributes, result.id)
    site.masks.makers.setdefault(result.id, (primitive, source))


def _reshape(site: Site) -> Value:
    try:
        return _reshaped(site)
    except UnsupportedError:
        if not site.order(0, range(len(site.inputs[0]))):
            raise
        return _reshaped(site)


def _reshaped(site: Site) -> Value:
    """Assign the operand's factors, in row-major order, to the axes of the result; fixed factors may be split."""
    waiting = [(factor, axis) for axis in range(len(site.inputs[0])) for factor in site.factors(0, axis)]
    waiting.reverse()
    form: list[Axis] = []
    fills: list[Fill | None] = []
    for vector in site.output:
        taken: list[Factor] = []
        sources: list[int] = []
        left = vector
        while set(left) != {1}:
            if not waiting:
                raise site.refusal("its shape splits a free axis")
            factor, axis = waiting.pop()
            part = factor
            if not factor.is_free and fixed(left):
                part = Factor(math.gcd(factor.size, left[0]))
            elif not factor.is_free and any(n % factor.size for n in left):
                raise site.refusal("its shape splits a free axis")
            elif (inner := site.quotient(factor, left)) is not None:  # sizes that are multiples of a number of elements
                part = Factor(left[0], inner)
                waiting.append((Factor(factor.size // left[0]), axis))
            sizes = site.vector(part)
            if part.size == 1 or any(m == 0 or n % m for n, m in zip(left, sizes, strict=True)):
                raise site.refusal("its shape splits a free axis")
            if not part.is_free and part.size < factor.size:
                waiting.append((Factor(factor.size // part.size), axis))
            left = tuple(n // m for n, m in zip(left, sizes, strict=True))
            taken.append(part)
            sources += [axis] if part.is_free else []
        form.append(axis_of(taken))
        known = {site.fill(0, axis) for axis in sources}
        fills.append(known.pop() if len(known) == 1 else None)
    return _moved(site, form, fills)


def _reduce(site: Site) -> Value:
    site.same_attributes()
    attributes, name = site.attributes_as(ReduceAttributes), site.step.op
    site.mask(0, attributes.axes, identity_of(name, site.dtype(0)), accepts_soft=name == "reduce_sum")
    value = site.operands[0]
    form: list[Axis] = [() if axis in attributes.axes else value.form[axis] for axis in range(len(value.form))]
    is_extreme = name in ("reduce_max", "reduce_min")
    keeps = [
        fill if fill is not None and not fill.is_soft and (is_extreme or fill.number == 0) else None
        for fill in value.fills
    ]
    result = result_of(site, form, keeps)
    return Value(result.id, result.form, result.fills, (name, value.id))


def _matmul(site: Site) -> Value:
    a, b = site.operands
    inner = site.join(a.form[-1], b.form[-2])
    inner = site.concrete(inner, site.inputs[0][-1])
    if is_free(inner):
        for k, axis in ((0, -1), (1, -2)):
            value = site.operands[k]
            form = list(value.form)
            form[axis] = inner
            site.operands[k] = Value(value.id, tuple(form), value.fills, value.part)
        _mask_contraction(site)
    a, b = site.operands
    batch: list[Axis] = []
    for axis in range(len(site.output) - 2):
        is_one = [set(site.inputs[k][axis]) == {1} for k in (0, 1)]
        sides = [value.form[axis] for value, one in zip((a, b), is_one, strict=True) if not one]
        batch.append(() if not sides else site.join(sides[0], sides[-1]))
    return result_of(site, (*batch, a.form[-2], b.form[-1]))


def _gathered(site: Site) -> Value:
    """Rows beyond the valid ones may choose any matrix: indices are clipped."""
    a, b, index = site.operands
    if any(map(is_free, (a.form[1], *b.form))):
        raise site.refusal("the matrices among which it chooses depend on the size")
    return result_of(site, (site.join(a.form[0], index.form[0]), b.form[2]))


def _mask_contraction(site: Site) -> None:
    """Mask the operands of a contraction so that the products beyond its valid elements are 0."""
    places = ((0, len(site.inputs[0]) - 1), (1, len(site.inputs[1]) - 2))
    for k, axis in places:
        fill = site.fill(k, axis)
        is_finite = fill is not None and math.isfinite(fill.number) and (fill.number == 0 or not fill.is_soft)
        if not (is_finite or _is_finite(site, k)):
            site.mask(k, (axis,), 0)
    if not any((fill := site.fill(k, axis)) is not None and fill.number == 0 for k, axis in places):
        k, axis = next((place for place in places if not _is_finite(site, place[0])), places[0])
        site.mask(k, (axis,), 0)


def _concat(site: Site) -> Value:
    site.same_attributes()
    attributes = site.attributes_as(ConcatAttributes)
    along = attributes.axis
    count = len(site.operands)
    parts = [site.factors(k, along) for k in range(count)]
    if any(map(is_free, parts[:-1])) and site.dtype(0) is not DType.BOOL:
        for k in range(count):
            site.mask(k, (along,), 0)  # so that elements beyond the valid ones need not be computed
    form: list[Axis] = []
    fills: list[Fill | None] = []
    for axis in range(len(site.output)):
        joined: Axis = None
        for value in site.operands:
            joined = site.join(joined, value.form[axis]) if axis != along else _concatenated(site, along, parts)
        known = {site.fill(k, axis) for k in range(count) if axis != along or is_free(parts[k])}
        form.append(joined)
        fills.append(known.pop() if len(known) == 1 else None)
    return result_of(site, form, fills)


def _concatenated(site: Site, along: int, parts: Sequence[tuple[Factor, ...]]) -> Axis:
    if any(map(is_free, parts[:-1])):
        return (Factor(site.output[along][0], parts=tuple(parts)),)
    if not is_free(parts[-1]):
        return axis_of([Factor(site.output[along][0])])
    last = prefix(parts[-1])
    if last is None:
        raise site.refusal("it joins an axis whose valid elements are not its first ones")
    before = sum(site.inputs[k][along][0] for k in range(len(parts) - 1))
    return (Factor(site.output[along][0], last.then(before)),)


def _write(site: Site) -> Value:
    site.same_attributes()
    axis = site.attributes_as(WriteAttributes).axis
    whole, rows, positions = site.operands
    if is_free(rows.form[axis]) or is_free(positions.form[0]):
        raise site.refusal("the number of its rows depends on the size")
    form = [own if i == axis else site.join(own, rows.form[i]) for i, own in enumerate(whole.form)]
    # Rows are written within the valid ones, so that those beyond them stay what they are.
    fills = [fill if i == axis else None for i, fill in enumerate(whole.fills)]
    return result_of(site, form, fills)


RULES: dict[str, Rule] = {
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "slice": part,
    "take": take,
    "pad": pad,
    "concat": _concat,
    "matmul": _matmul,
    GATHERED: _gathered,
    "conv": conv,
    "pool_sum": pool,
    "pool_max": pool,
    "reduce_sum": _reduce,
    "reduce_prod": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "loop": loop,
    "opaque": whole,
    WRITE_ROWS: _write,
}
