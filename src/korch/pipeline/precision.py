"""A float32 model and an error budget -> forms of its products in less precise types, each with its error.

A product by constant weights may be computed with bytes: its data is quantized to 8 bits with a scale for each input
channel, calibrated on inputs, and its weights with a scale for each output channel. Or both are rounded to bfloat16, or
to float16, which has an eighth of the error. A product with few rows may read weights stored as bytes or bfloat16. Each
form is an alternative of the product. Its error is the error of the model's outputs if only this form is used. Errors
of several forms are assumed to be independent, so their squares add up: the row of the program is
Σ (error / budget)² ≤ 1. The plan's results are compared with exact ones, and the row is changed if that sum was wrong.

The scale of channel c is a weighted geometric mean of the ranges of c and of the widest channel. With the channels' own
ranges, their differences would move into the weights; with one range for all, small channels would lose precision (Xiao
et al., SmoothQuant, ICML 2023). Scales depend on the data alone, so products of the same data read the same bytes.
"""

import math
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from korch.candidate.candidate import Candidate, Group, make_group
from korch.equivalence.rule import origin_of, rule_of
from korch.equivalence.rules.integers import MOST_TERMS
from korch.limits import DEFAULT_LIMITS, SearchLimits
from korch.numerics import differences, worst
from korch.primitive import reference
from korch.primitive.graph import Constant, GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.op import Array, Attributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.quantized import largest_terms, quantize
from korch.primitive.types import DType, ValueId, ValueType
from korch.primitive.verbs import Verbs
from korch.runtime.report import FormRecord, PrecisionRecord
from korch.search.instance import Errors
from korch.segments.block import Partition
from korch.segments.block_task import BlockTask
from korch.system.deadline import Deadline

FORM_SECONDS = 60.0  # time to determine the errors of forms; products without a known error then have no form
FORM_SEARCHES = 3  # number of searches with a changed sum of errors, before the model is left as it is
FORM_MOST = 0.9  # largest allowed error on a few inputs, as a part of the budget: on other inputs it is larger
FORM_AIM = 0.8  # a changed sum of errors aims at this part of the budget
FORM_NEAR = 0.6  # a plan that uses at least this part of the budget is not searched again

Feeds = Mapping[str, Array]
HasKernel = Callable[[Group], bool]
Key = tuple[str, Attributes, str]
"""Products with equal keys have the same forms: operation, attributes and the digest of the weights."""

UNITS = 10_000  # the error budget, in the integer units of the linear program
FEW_ROWS = 8  # the most rows with which a product takes only as long as reading its weights

HEADROOM = 1.3
"""The ratio of the range of bytes to that of the data in calibration: clipped data of other inputs has large errors."""

EVENNESS = 0.5
"""The exponent of a channel's own range in its scale; the widest channel's range has 1 minus this exponent."""

HALVES = {DType.BF16: 0.5, DType.F16: 0.3}
"""The 16-bit types in which products are multiplied, the fastest first, with the fraction of the time that is saved."""

MOST_IN_F16 = 4096.0
"""The largest element in calibration of data that is rounded to float16: other inputs may have 16 times larger ones."""

BYTE_FLOP = 8
"""The cost of a byte of weights in a product with few rows, in floating-point operations."""


@dataclass(frozen=True, eq=False)
class Form:
    """A product in less precise types."""

    key: Key  # the product's key
    name: str  # the name of the rule from which its primitives come, and the product's node
    weights: Array  # the stored weights: bytes, bfloat16 or float16
    factor: Array | None = None  # the factor of the sums, with the result's rank, and size 1 except for output channels
    scale: Array | None = None  # the quantization step of the data by channel; None if the data is not quantized
    zero: Array | None = None  # the zero points of the data; None for 0
    dtype: DType = DType.F32  # the type to which the data is rounded
    saving: float = 0.0  # an estimate of the saved floating-point operations
    error: float = math.inf  # the error of the model's outputs, relative to the largest element of each

    @property
    def mark(self) -> str:
        """The digest of the constant that its last primitive reads."""
        return Constant.of(self.weights if self.factor is None else self.factor).digest

    def write(self, v: Verbs, x: ValueId) -> ValueId:
        """Add the primitives that multiply a value in this form, and return the result."""
        op, attributes = self.key[:2]
        weights = v.constant(self.weights)
        if self.scale is None:
            x = v.cast(v.cast(x, self.dtype), DType.F32)
            y = v.add(op, x, v.cast(weights, DType.F32), attributes=attributes)
            return y if self.factor is None else v.elementwise("mul", y, v.constant(self.factor))
        zero = None if self.zero is None else v.constant(self.zero)
        quotient = v.elementwise("mul", x, v.constant((1 / self.scale).astype(np.float32)))
        sums = v.add(op, quantize(v, quotient, zero, self.dtype), weights, attributes=attributes)
        if self.zero is not None:
            offset = self.zero.astype(np.int32) @ self.weights.astype(np.int32)
            sums = v.elementwise("add", sums, v.constant(-offset.astype(np.int32)))
        y = v.cast(sums, DType.F32)
        return y if self.factor is None else v.elementwise("mul", y, v.constant(self.factor))


def key_of(graph: PrimitiveGraph, primitive: Primitive) -> Key | None:
    """Return the key of a product that may have forms, None for everything else."""
    weights = graph.constants.get(primitive.inputs[1]) if primitive.op in ("matmul", "conv") else None
    if weights is None or weights.is_uniform or graph.types[primitive.output].dtype is not DType.F32:
        return None
    if primitive.op == "matmul" and math.prod(weights.type.shape[:-2]) != 1:
        return None
    return (primitive.op, primitive.attributes, weights.digest)


def with_forms(graph: PrimitiveGraph, forms: Iterable[Form], only: bool = False) -> PrimitiveGraph:
    """Return a graph whose own products have forms as alternatives; if `only`, the forms replace the products."""
    by_key: dict[Key, list[Form]] = {}
    for form in forms:
        by_key.setdefault(form.key, []).append(form)
    builder, gone = GraphBuilder.from_graph(graph), set()
    for p, primitive in enumerate(graph.primitives):
        key = None if graph.origins and rule_of(graph.origins[p]) else key_of(graph, primitive)
        for form in by_key.get(key, ()) if key is not None else ():
            verbs = Verbs(builder, origin_of(form.name))
            builder.merge(primitive.output, form.write(verbs, ValueId(primitive.inputs[0])))
            gone.add(key)
    if not gone:
        return graph
    found = builder.freeze()
    if not only:
        return found
    return found.with_primitives(
        [p for p, q in enumerate(found.primitives) if rule_of(found.origins[p]) or key_of(found, q) not in gone]
    )


@dataclass(frozen=True)
class Kernels:
    """Tells for which products the target has kernels."""

    of_bytes: HasKernel  # whether some kernel computes a group with a product of bytes
    # whether some kernel computes a group with a product of widened bfloat16 or float16 faster than a product of
    # float32
    of_halves: HasKernel


@dataclass
class _Channels:
    """The range of the data of products with one key, per channel."""

    primitive: Primitive
    name: str
    low: Array
    high: Array


def find_forms(
    graph: PrimitiveGraph,
    samples: Sequence[Feeds],
    budget: float,
    kernels: Kernels,
    deadline: Deadline,
    limits: SearchLimits,
) -> tuple[Form, ...]:
    """Return forms of a model's products, with their errors, that may be worth using within a budget."""
    channels, values = _calibrated(graph, samples)
    order = reference.first_alternatives(graph)
    forms = [
        form
        for key, found in channels.items()
        for form in _forms_of(graph, key, found, limits.form_bytes)
        if _is_multiplied(graph, form, kernels)
    ]
    end = deadline.until(time.monotonic() + FORM_SECONDS)
    known, others = list[Form](), forms
    for half in HALVES:
        own = [form for form in forms if form.dtype is half]
        together = _error(graph, order, values, own) if own else math.inf
        if together <= budget:  # then each form's own error does not matter, and slower forms are not needed
            known = [replace(form, error=together / math.sqrt(len(own))) for form in own]
            slower = [*HALVES][[*HALVES].index(half) :]
            others = [form for form in forms if form.dtype not in slower]
            break
    for form in sorted(others, key=lambda form: -form.saving):
        if end.is_over:
            break
        error = _error(graph, order, values, [form])
        if error <= budget:
            known.append(replace(form, error=error))
    return tuple(affordable(known, limits.form_slack * budget**2))


def affordable(forms: Iterable[Form], most: float) -> list[Form]:
    """Return the forms with the best ratio of saving to squared error, until the sum of squares exceeds a limit."""
    found: list[Form] = []
    total = 0.0
    for form in sorted(forms, key=lambda form: -form.saving / max(form.error**2, 1e-30)):
        total += form.error**2
        if total > most and found:
            break
        found.append(form)
    return found


def _error(
    graph: PrimitiveGraph, order: Iterable[Primitive], values: Mapping[int, Array], forms: Iterable[Form]
) -> float:
    """Return the error of the outputs if some products use forms; only values that depend on these are recomputed."""
    changed: dict[int, Array] = {}
    by_key = {form.key: form for form in forms}
    for primitive in order:
        now = ChainMap(changed, cast(dict[int, Array], values))
        key = key_of(graph, primitive)
        form = None if key is None else by_key.get(key)
        if form is not None:
            changed[primitive.output] = _computed(form, now[primitive.inputs[0]])
        elif not changed.keys().isdisjoint(primitive.inputs):
            changed[primitive.output] = reference.apply(graph, primitive, now, exact=False)
    outputs = {name: value for name, value in graph.outputs if value in changed}
    found = {name: changed[value] for name, value in outputs.items()}
    return worst(differences(found, {name: values[value] for name, value in outputs.items()})).of_largest


def _computed(form: Form, x: Array) -> Array:
    """Return the result of a form for its data."""
    builder = GraphBuilder()
    value = builder.input("x", ValueType(tuple(x.shape), DType.F32))
    builder.output("y", form.write(Verbs(builder, ""), value))
    return reference.run(builder.freeze(), {"x": x}, exact=False)["y"]


def error_of(graph: PrimitiveGraph, samples: Iterable[Feeds], expected: Iterable[Feeds]) -> float:
    """Return the largest error of a graph's outputs in its own types, relative to the largest element of each."""
    errors = (
        worst(differences(reference.run(graph, feeds, exact=False), wanted)).of_largest
        for feeds, wanted in zip(samples, expected, strict=True)
    )
    return max(errors, default=0.0)


def _calibrated(graph: PrimitiveGraph, samples: Sequence[Feeds]) -> tuple[dict[Key, _Channels], dict[int, Array]]:
    """Return the ranges of the data of each product over some inputs, and all values for the last input."""
    origins = dict(zip(graph.primitives, graph.origins, strict=True))
    found: dict[Key, _Channels] = {}

    def watch(primitive: Primitive, values: Mapping[int, Array]) -> None:
        key = key_of(graph, primitive)
        if key is None:
            return
        x = values[primitive.inputs[0]]
        axes = tuple(a for a in range(x.ndim) if a != (1 if primitive.op == "conv" else x.ndim - 1))
        low, high = x.min(axes, keepdims=True, initial=0), x.max(axes, keepdims=True, initial=0)
        known = found.setdefault(key, _Channels(primitive, origins.get(primitive, ""), low, high))
        known.low, known.high = np.minimum(known.low, low), np.maximum(known.high, high)

    for feeds in samples[:-1]:
        reference.run(graph, feeds, exact=False, watch=watch)
    kept: dict[int, Array] = {}

    def keep(primitive: Primitive, values: Mapping[int, Array]) -> None:
        watch(primitive, values)
        kept.update(values)

    reference.run(graph, samples[-1], exact=False, watch=keep)
    return found, kept


def _forms_of(graph: PrimitiveGraph, key: Key, found: _Channels, least_bytes: int) -> list[Form]:
    """Return the forms of a product, without their errors."""
    primitive = found.primitive
    weights = graph.constants[primitive.inputs[1]].array
    data = graph.types[primitive.inputs[0]].shape
    rows = math.prod(data[:-1]) if primitive.op == "matmul" else FEW_ROWS + 1
    if weights.nbytes < least_bytes or not all(np.isfinite(a).all() for a in (weights, found.low, found.high)):
        return []
    if rows <= FEW_ROWS:
        half, (stored, factor) = weights.astype(DType.BF16.numpy), _rounded(weights, primitive.op)
        saved = BYTE_FLOP * weights.nbytes
        return [
            Form(key, f"weights-in-bytes {found.name}", stored, factor, saving=0.75 * saved),
            Form(key, f"weights-in-bfloat16 {found.name}", half, saving=0.5 * saved),
        ]
    flop = graph.work_flop(primitive)
    most = max(float(np.abs(a).max()) for a in (weights, found.low, found.high))
    halves = [
        Form(
            key,
            f"product-of-{half.numpy.name} {found.name}",
            weights.astype(half.numpy),
            dtype=half,
            saving=saved * flop,
        )
        for half, saved in HALVES.items()
        if half is not DType.F16 or most <= MOST_IN_F16
    ]
    if largest_terms(primitive.op, weights.shape) > MOST_TERMS:
        return halves
    scale, zero, dtype = _grid(found, may_shift=primitive.op == "matmul")
    stored, factor = _rounded(weights * _by_input(scale, weights, primitive), primitive.op)
    return [*halves, Form(key, f"product-of-bytes {found.name}", stored, factor, scale, zero, dtype, 0.3 * flop)]


def _grid(found: _Channels, may_shift: bool) -> tuple[Array, Array | None, DType]:
    """Return scales by channel, zero points and the type of the data's bytes."""
    low, high = HEADROOM * found.low.astype(np.float64), HEADROOM * found.high.astype(np.float64)
    is_signed = bool((low < 0).any())
    shifts = is_signed and may_shift
    span = high - low if shifts or not is_signed else 2 * np.maximum(-low, high)
    widest = float(span.max(initial=0)) or 1.0
    span = np.where(span > 0, span, widest)
    scale = span**EVENNESS * widest ** (1 - EVENNESS) / (254 if is_signed and not shifts else 255)
    scale = scale.astype(np.float32)
    zero = np.clip(np.rint(-low / scale), 0, 255).astype(np.uint8) if shifts else None
    return scale, zero, DType.I8 if is_signed and not shifts else DType.U8


def _by_input(scale: Array, weights: Array, primitive: Primitive) -> Array:
    """Return scales by input channel in a shape that broadcasts to the weights."""
    flat, attributes = scale.reshape(-1), primitive.attributes
    if not isinstance(attributes, ConvAttributes):
        return flat.reshape(-1, 1)
    groups = attributes.groups
    of_group = flat.reshape(groups, -1).repeat(weights.shape[0] // groups, axis=0)
    return of_group.reshape(*of_group.shape, *(1,) * (weights.ndim - 2))


def _rounded(weights: Array, op: str) -> tuple[Array, Array]:
    """Return weights as bytes with a scale for each output channel, and the scales in a shape for the result."""
    axes = tuple(range(1, weights.ndim)) if op == "conv" else tuple(range(weights.ndim - 1))
    wide = weights.astype(np.float64)
    factor = np.abs(wide).max(axes, keepdims=True) / 127
    factor = np.where(factor > 0, factor, 1.0)
    stored = np.rint(wide / factor).astype(np.int8)
    shape = (1, -1, *(1,) * (weights.ndim - 2)) if op == "conv" else factor.shape
    return stored, factor.reshape(shape).astype(np.float32)


def _is_multiplied(graph: PrimitiveGraph, form: Form, kernels: Kernels) -> bool:
    """Return whether some kernel computes the product in this form."""
    if form.dtype is DType.F32:
        return True
    is_half = form.dtype in HALVES
    primitive = next(p for p in graph.primitives if key_of(graph, p) == form.key)
    builder = GraphBuilder()
    x = builder.input("x", replace(graph.types[primitive.inputs[0]], dtype=form.dtype))
    w = builder.constant(form.weights)
    if is_half:
        x, w = (Verbs(builder, "").cast(value, DType.F32) for value in (x, w))
    builder.output("y", builder.add(primitive.op, (x, w), primitive.attributes))
    own = builder.freeze()
    group = make_group(own, range(len(own.primitives)), (own.primitives[-1].output,))
    return kernels.of_halves(group) if is_half else kernels.of_bytes(group)


@dataclass(eq=False)
class Precision:
    """The forms of a model, and the inputs on which plans are checked."""

    budget: float  # the largest error of the outputs
    forms: tuple[Form, ...]  # the forms that may be chosen
    samples: Sequence[Feeds]  # inputs that were not used for calibration, and `expected`, their exact outputs
    expected: Sequence[Feeds]
    source: str  # the source of the inputs
    limits: SearchLimits = DEFAULT_LIMITS  # when the search is repeated
    factor: float = 1.0  # the factor of the budget in the program's row, adjusted after checks
    error: float = 0.0  # the error of the plan on these inputs
    tried: list[float] = field(default_factory=list)

    def tasks(self, tasks: Sequence[BlockTask], partition: Partition) -> list[BlockTask]:
        """Return tasks with the errors of their less precise primitives, each with a share of the budget.

        A task's forms are used in all of its instances or in none. The budget goes to the forms that save most for
        their errors. The sum over all segments is within the budget for any choice in each segment.
        """
        marks = {form.mark: form for form in self.forms}
        costs: list[dict[int, int]] = []
        items: list[tuple[float, int, int]] = []
        for b, task in enumerate(tasks):
            own: dict[int, int] = {}
            for p, origin in enumerate(task.block.graph.origins):
                found = [_form_at(partition.instances[i].graph, p, marks) for i in task.block.instances]
                forms = [form for form in found if form is not None]
                if rule_of(origin) and forms:
                    own[p] = sum(max(1, math.ceil(UNITS * (form.error / self.budget) ** 2)) for form in forms)
                    items.append((sum(form.saving for form in forms) / own[p], b, own[p]))
            costs.append(own)
        shares = _shares(items, len(tasks), int(UNITS * self.factor))
        return [
            replace(task, errors=Errors(own, shares[b])) if own else task
            for b, (task, own) in enumerate(zip(tasks, costs, strict=True))
        ]

    def check(self, graph: PrimitiveGraph, steps: Iterable[Candidate], has_time: bool = True) -> bool:
        """Compute a plan's error; return whether the search must be repeated with another limit for the sum of errors.

        `has_time`: whether there is time to search for a plan that uses more of the budget.
        """
        own = graph.with_primitives(sorted({p for step in steps for p in step.group.primitives}))
        used = {rule_of(origin) for origin in own.origins}
        total = sum((form.error / self.budget) ** 2 for form in self.forms if form.name in used)
        if not total or (self.tried and not self.factor):
            self.error = 0.0
            return False
        self.error = error_of(own, self.samples, self.expected)
        ratio, limits = self.error / self.budget, self.limits
        is_last = len(self.tried) >= FORM_SEARCHES
        self.tried.append(ratio)
        changed = (FORM_AIM / max(ratio, 0.1)) ** 2
        if ratio > FORM_MOST:
            self.factor = 0.0 if is_last else min(self.factor, total) * changed
            return True
        is_over = is_last or not has_time or self.factor >= limits.form_slack
        if ratio >= FORM_NEAR or is_over or max(self.tried) > FORM_MOST:
            return False
        self.factor = min(limits.form_slack, self.factor * changed)
        return True

    def record(self, origins: Iterable[str]) -> PrecisionRecord:
        """Return the report's record for a plan whose primitives have these origins."""
        used = {rule_of(origin) for origin in origins}
        rows = tuple(FormRecord(form.name, form.error) for form in self.forms if form.name in used)
        return PrecisionRecord(self.budget, self.error, self.source, len(self.forms), rows, len(self.tried) or 1)


def _form_at(graph: PrimitiveGraph, p: int, marks: Mapping[str, Form]) -> Form | None:
    """Return the form whose last primitive is the given one, None if there is none."""
    primitive = graph.primitives[p]
    if primitive.op not in ("cast", "mul"):
        return None
    repeated = [q.inputs[0] for value in primitive.inputs for q in graph.producing(value, "broadcast")]
    for value in (*primitive.inputs, *repeated):
        constant = graph.constants.get(value)
        form = None if constant is None else marks.get(constant.digest)
        if form is not None and primitive.op == ("cast" if form.factor is None else "mul"):
            return form
    return None


def _shares(items: Iterable[tuple[float, int, int]], count: int, most: int) -> list[int]:
    """Return each block's share of a budget: the errors of its forms, taken in order of saving per error."""
    if count == 1:
        return [most]
    shares, left = [0] * count, most
    for _, b, error in sorted(items, reverse=True):
        if error <= left:
            shares[b] += error
            left -= error
    return shares
