"""A linear primitive as a contraction: out[batch, row, column] = sum over terms of a * b.

Each axis of the contraction combines axes of the primitive's tensors. The rows of a convolution are its
images and output positions; its terms are the window positions (taps) and channels (implicit im2col).
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from korch.candidate.candidate import Group, Refusal
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.linear import BYTES, ConvAttributes
from korch.primitive.types import DType, row_major_strides
from korch.ranges.live import count_of, flattened
from korch.tile.ir.index import ZERO, Expr, Ranges, add, constant, quotient, remainder, scale, var
from korch.tile.ir.program import Buffer, Panels, Split
from korch.tile.lower.buffers import ports
from korch.tile.lower.emit import Emitter, Index, physical_offset

Axes = tuple[tuple[str, int], ...]
"""Names and extents, outermost first; none of extent 1."""

FLOATS = (DType.F32, DType.F16, DType.BF16)

OF_BYTES = (DType.U8, DType.I8, DType.I16, DType.I32, DType.BOOL, *FLOATS)
"""The element types that are allowed before and after a product of bytes."""


Layouts = tuple[tuple[Layout, ...], tuple[Layout, ...]]
"""The layouts of a group's inputs and of its outputs."""


class NotFusedError(Exception):
    """A part of a group can't be fused into its kernel; the text says which."""


@dataclass(frozen=True)
class Contraction:
    """The axes of a linear primitive, and the indices of its elements."""

    batch: Axes  # axes of both operands and the result
    rows: Axes  # axes of a and out
    columns: Axes  # axes of b and out
    terms: Axes  # axes of a and b, along which products are summed
    a: Index  # the index of the first operand's element
    b: Index  # the index of the second operand's element
    out: Index  # the index of the result's element
    # more axes of a and out, outside of the rows: those before an axis of rows that a size needs a part of
    leading: Axes = ()

    @property
    def ranges(self) -> Ranges:
        """The range of each variable."""
        axes = (*self.batch, *self.leading, *self.rows, *self.columns, *self.terms)
        return {name: (0, max(extent - 1, 0)) for name, extent in axes}


def extent(axes: Axes) -> int:
    """Return the number of points of some axes."""
    return flattened([n for _, n in axes])


def root_of(group: Group, *ops: str) -> Primitive | Refusal:
    """Return the one linear primitive of a group, if all others can be fused with it."""
    body = group.body
    linear = body.linear
    if len(linear) != 1 or linear[0].op not in ops:
        return Refusal(f"it is not one of {', '.join(ops)}")
    for primitive in body.primitives:
        if primitive.row.category in (Category.REDUCE, Category.OPAQUE):
            return Refusal(f"{primitive.op} is not fused into a product")
    if body.types[linear[0].output].dtype not in FLOATS and not is_of_bytes(body, linear[0]):
        return Refusal("the elements are not floats of at most 32 bits, nor bytes")
    if min(t.size for t in (*group.input_types, *group.output_types)) == 0:
        return Refusal("a tensor is empty")
    return linear[0]


def is_of_bytes(body: PrimitiveGraph, root: Primitive) -> bool:
    """Return whether a linear primitive multiplies bytes, with 32-bit sums."""
    return body.types[root.inputs[0]].dtype in BYTES and body.types[root.output].dtype is DType.I32


def refuse_outputs(body: PrimitiveGraph, root: Primitive) -> Refusal | None:
    """Return why the steps after a product can't be fused into it, whatever the layouts are; None if they may be."""
    found = {root.output}
    for primitive in body.primitives:
        keeps = primitive.row.category is Category.ELEMENTWISE
        keeps = keeps or isinstance(primitive.attributes, TransposeAttributes | ReshapeAttributes)
        if keeps and not found.isdisjoint(primitive.inputs):
            found.add(primitive.output)
    return None if found.issuperset(value for _, value in body.outputs) else Refusal(_NOT_FUSED)


def refuse_types(
    body: PrimitiveGraph, *roots: Primitive, inside: Set[int] = frozenset(), with_bytes: bool = False
) -> Refusal | None:
    """Return why a kernel that multiplies float32 can't compute a group with some products; None if it can.

    Args:
        body: the group's graph; elements before and after the products may be 16-bit floats.
        roots: the products.
        inside: values that the kernel does not hold in their own type.
        with_bytes: whether the kernel also computes products of bytes.
    """
    if with_bytes and all(is_of_bytes(body, root) for root in roots):
        is_known = all(type_.dtype in OF_BYTES for type_ in body.types)
        return None if is_known else Refusal("around a product of bytes there are elements of more than 32 bits")
    if any(body.types[value].dtype is not DType.F32 for root in roots for value in (*root.inputs, root.output)):
        return Refusal("the product is not one of float32")
    chosen = {p.inputs[0] for p in body.primitives if p.op == "where"}
    conditions = {p.output for p in body.primitives if p.output in chosen and body.types[p.output].dtype is DType.BOOL}
    conditions -= {value for _, value in body.outputs}
    beside = [type_ for value, type_ in enumerate(body.types) if value not in inside and value not in conditions]
    if any(type_.dtype not in FLOATS for type_ in beside):
        return Refusal("the elements are not floats of at most 32 bits")
    return None


def contraction_of(group: Group, root: Primitive, last: bool) -> Contraction:
    """Return the axes of a matrix product or a convolution.

    `last`: whether channels are the innermost axis of images, and therefore the innermost terms.
    """
    first, second, out = (group.body.types[v].shape for v in (*root.inputs, root.output))
    if root.op == "matmul":
        return matmul_axes(first, second, out)
    if not isinstance(root.attributes, ConvAttributes):
        raise AssertionError(f"{root.op} is no contraction")
    return _conv(second, out, root.attributes, last)


def _variables(prefix: str, sizes: Sequence[int]) -> tuple[list[Expr], Axes]:
    names = [f"{prefix}{i}" for i in range(len(sizes))]
    exprs = [ZERO if n == 1 else var(name) for name, n in zip(names, sizes, strict=True)]
    return exprs, tuple((name, n) for name, n in zip(names, sizes, strict=True) if n != 1)


def matmul_axes(a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]) -> Contraction:
    """Return the axes of a matrix product of given shapes."""
    batch, batch_axes = _variables("b", out[:-2])
    (m, n, k), _ = _variables("x", (out[-2], out[-1], a[-1]))
    rows, columns, terms = ((("x0", out[-2]),), (("x1", out[-1]),), (("x2", a[-1]),))
    index_a = tuple(ZERO if n == 1 else e for n, e in zip(a[:-2], batch, strict=True))
    index_b = tuple(ZERO if n == 1 else e for n, e in zip(b[:-2], batch, strict=True))
    row_axes: Axes = tuple(axis for axis in rows if axis[1] != 1)
    leading: Axes = ()
    if all(size == 1 for size in b[:-2]):  # the second operand is one matrix: batch axes become rows
        row_axes, batch_axes = (*batch_axes, *row_axes), ()
        leading, row_axes = _whole_axes(row_axes)
    return Contraction(
        batch_axes,
        row_axes,
        tuple(axis for axis in columns if axis[1] != 1),
        tuple(axis for axis in terms if axis[1] != 1),
        (*index_a, m, k),
        (*index_b, k, n),
        (*batch, m, n),
        leading,
    )


def _whole_axes(rows: Axes) -> tuple[Axes, Axes]:
    """Return the axes outside of the first one that a size needs a part of, and the other axes."""
    first = next((i for i, (_, n) in enumerate(rows) if count_of(n)), 0)
    return rows[:first], rows[first:]


def _conv(w: tuple[int, ...], out: tuple[int, ...], at: ConvAttributes, last: bool) -> Contraction:
    per_group = w[0] // at.groups
    (g, o, c, image), _ = _variables("x", (at.groups, per_group, w[1], out[0]))
    places, place_axes = _variables("p", out[2:])
    taps, tap_axes = _variables("t", w[2:])
    source = tuple(
        add(scale(places[i], at.strides[i]), scale(taps[i], at.dilations[i]), constant(-at.pads_begin[i]))
        for i in range(len(places))
    )
    channel: Axes = (("x2", w[1]),) if w[1] != 1 else ()
    channel_out = add(scale(g, per_group), o)
    leading, rows = _whole_axes(((("x3", out[0]),) if out[0] != 1 else ()) + place_axes)
    return Contraction(
        batch=(("x0", at.groups),) if at.groups != 1 else (),
        rows=rows,
        columns=(("x1", per_group),) if per_group != 1 else (),
        terms=(*tap_axes, *channel) if last else (*channel, *tap_axes),
        a=(image, add(scale(g, w[1]), c), *source),
        b=(channel_out, c, *taps),
        out=(image, channel_out, *places),
        leading=leading,
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """An operand that is packed when the kernel is built: the number of its elements, and their layout in memory."""

    elements: int
    layout: tuple[Panels | Split, ...] = ()


def in_panels(rows: int, columns: int, width: int, group: int = 1) -> Packed:
    """Return a matrix in panels of `width` columns, in each of which `group` rows are adjacent in memory."""
    return Packed(rows * columns, (Panels(columns, width, group),))


_NOT_FUSED = "an output is not computed from the product element by element"


class Fusion:
    """The operations before and after a linear primitive, emitted by an `Emitter`.

    Raises:
        NotFusedError: from any method, if an operation can't be fused.
    """

    def __init__(self, group: Group, layouts: Layouts, *roots: Primitive) -> None:
        self.body = group.body
        self.roots = {root.output for root in roots}
        self.place = {value: name for name, value in group.body.inputs}
        names = [name for name, _ in (*group.body.inputs, *group.body.outputs)]
        self.layouts = dict(zip(names, (*layouts[0], *layouts[1]), strict=True))

    def emitter(self, ranges: Ranges) -> Emitter:
        """Return an emitter for given ranges of variables."""
        return Emitter(self.body, self._home, ranges)

    def _home(self, value: int, index: Index, ranges: Ranges) -> tuple[str, Expr] | None:
        if value in self.place:
            name = self.place[value]
            shape = self.body.types[value].shape
            return name, physical_offset(self.layouts[name], shape, index, ranges)
        refuse_computed(self.body, value)
        return None

    def memory(self, packed: Mapping[str, Packed] = MappingProxyType({})) -> Iterator[Buffer]:
        """Yield the buffers of the group's inputs and outputs; the inputs in `packed` are packed."""
        for buffer in ports(self.body, self.layouts):
            own = packed.get(buffer.name)
            yield buffer if own is None else replace(buffer, elements=own.elements, layout=own.layout)

    def argument(self, emitter: Emitter, value: int, index: Index) -> str:
        """Return the name of an element of an operand; it is zero outside of the operand's shape."""
        type_ = self.body.types[value]
        guards = tuple(
            guard for expr, n in zip(index, type_.shape, strict=True) for guard in emitter.inside(expr, 0, n)
        )
        name = emitter.value(value, index, guards)
        if guards and value not in self.place:
            name = emitter.select(type_.dtype, guards, name, emitter.literal(type_.dtype, 0.0))
        return name

    def outputs(
        self, emitter: Emitter, root: Primitive, index: Index, result: str
    ) -> list[tuple[str, DType, Expr, str]]:
        """Return buffer, element type, index and name of each output's element."""
        indices = follow(emitter, root, index, result)
        found = []
        for name, value in self.body.outputs:
            if value not in indices:
                raise NotFusedError(_NOT_FUSED)
            type_, moved = self.body.types[value], indices[value]
            place = physical_offset(self.layouts[name], type_.shape, moved, emitter.ranges)
            found.append((name, type_.dtype, place, emitter.value(value, moved)))
        return found


def refuse_computed(body: PrimitiveGraph, value: int) -> None:
    """Raise NotFusedError for the result of a reduction, a product or an opaque operator."""
    for p in body.producers[value]:
        if body.primitives[p].row.category in (Category.REDUCE, Category.LINEAR, Category.OPAQUE):
            raise NotFusedError(f"a result of {body.primitives[p].op} is read out of order")


def follow(emitter: Emitter, root: Primitive, index: Index, result: str) -> dict[int, Index]:
    """Return the index that an element of a product has in each value that is computed from it.

    Elementwise primitives keep the index; transpositions and reshapes change it. Values that other
    primitives compute from the product are left out.

    `emitter`: records the names of moved elements.
    """
    body, indices = emitter.body, {root.output: index}
    emitter.give(root.output, index, result)
    for primitive in body.primitives:
        known = [indices[value] for value in primitive.inputs if value in indices]
        if not known:
            continue
        moved = known[0]
        match primitive.attributes:
            case TransposeAttributes(perm):
                moved = tuple(moved[axis] for axis in perm)
            case ReshapeAttributes(shape):
                moved = reshaped(moved, body.types[primitive.inputs[0]].shape, shape, emitter.ranges)
            case _ if primitive.row.category is not Category.ELEMENTWISE:
                continue
        if any(other != known[0] for other in known):
            raise NotFusedError("operands have the results of the product in different orders")
        if primitive.row.category is not Category.ELEMENTWISE:
            emitter.give(primitive.output, moved, emitter.value(primitive.inputs[0], known[0]))
        indices[primitive.output] = moved
    return indices


def reshaped(index: Index, shape: Sequence[int], to: Sequence[int], ranges: Ranges) -> Index:
    """Return the index that an element of `shape` has in the shape `to`."""
    flat = add(ZERO, *(scale(e, s) for e, s in zip(index, row_major_strides(tuple(shape)), strict=True)))
    return tuple(
        ZERO if n == 1 else remainder(quotient(flat, step, ranges), n, ranges)
        for n, step in zip(to, row_major_strides(tuple(to)), strict=True)
    )
