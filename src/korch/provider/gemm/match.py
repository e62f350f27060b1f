"""Group -> one matrix product, and where its operands and results lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.types import DType
from korch.provider.epilogue import RESULT, Epilogue
from korch.schedule.contraction import Fusion, NotFusedError, refuse_types, reshaped, root_of
from korch.tile.emit import Index
from korch.tile.index import ZERO, Expr, Ranges, add, scale, var, vector_step
from korch.tile.program import Apply, Load

MOVES = ("transpose", "reshape", "slice", "take")
"""What may stand between an input and a product, beside casts that widen 16-bit floats or constant bytes."""

BATCH, ROW, COLUMN, TERM = "i", "m", "n", "k"
"""The variables of a product: out[i, m, n] = sum over k of a[i, m, k] * b[i, k, n]."""


@dataclass(frozen=True, eq=False)
class Product:
    """A product: the positions of the two inputs that it reads, perhaps moved."""

    primitive: Primitive
    a: int
    b: int


@dataclass(frozen=True)
class Matrices:
    """The indices of a product's elements, and the ranges of their variables."""

    a: Index
    b: Index
    out: Index
    ranges: Ranges


@dataclass(frozen=True)
class Operand:
    """Where element [i, j, k] of an operand lies: start(i) + row_step * j + step * k."""

    position: int
    start: Expr
    row_step: int
    step: int


def match_group(group: Group) -> Product | Refusal:
    """Return what a group is, or why it is not a matrix product."""
    root = root_of(group, "matmul")
    if isinstance(root, Refusal):
        return root
    stored = {cast.inputs[0] for cast in group.body.primitives if is_widened(group, cast)}
    refusal = refuse_types(group.body, root, inside=stored, with_bytes=True)
    if refusal is not None:
        return refusal
    a, b = (source_of(group, value) for value in root.inputs)
    if a is None or b is None:
        return Refusal("an operand is computed in the group")
    return Product(root, a, b)


def source_of(group: Group, value: int) -> int | None:
    """Return the position of the input that only was moved to give a value; None if it is none."""
    while value not in group.position:
        makers = group.body.producers[value]
        maker = group.body.primitives[makers[0]] if makers else None
        if maker is None or not (maker.op in MOVES or is_widened(group, maker)):
            return None
        value = maker.inputs[0]
    return group.position[value]


def is_widened(group: Group, cast: Primitive) -> bool:
    """Return whether a primitive widens 16-bit floats, or bytes that are constant."""
    return group.body.is_widening(cast, group.position.get(cast.inputs[0]) in group.constant_inputs)


def matrices_of(body: PrimitiveGraph, product: Primitive) -> Matrices:
    """Return the indices of a product's elements."""
    a, b, out = (body.types[value].shape for value in (*product.inputs, product.output))
    sizes = {BATCH: math.prod(out[:-2]), ROW: out[-2], COLUMN: out[-1], TERM: a[-1]}
    ranges = {name: (0, max(n - 1, 0)) for name, n in sizes.items()}
    i, m, n, k = (ZERO if size == 1 else var(name) for name, size in sizes.items())
    batch = reshaped((i,), (sizes[BATCH],), out[:-2], ranges)
    sides = [tuple(ZERO if size == 1 else e for size, e in zip(shape[:-2], batch, strict=True)) for shape in (a, b)]
    return Matrices((*sides[0], m, k), (*sides[1], k, n), (*batch, m, n), ranges)


def operand_of(fusion: Fusion, value: int, index: Index, ranges: Ranges) -> Operand:
    """Return where the matrices of an operand lie.

    Args:
        fusion: the group around the product.
        value: the operand.
        index: the index of an element, whose last two variables are the row and the column.
        ranges: of the variables.

    Raises:
        NotFusedError: its rows are not equally far apart, or it is computed in the group.
    """
    emitter = fusion.emitter(ranges)
    name = emitter.value(value, index)
    load = next(op for op in emitter.ops if op.name == name)
    if isinstance(load, Apply) and load.op == "cast" and load.dtype is DType.F32:
        load = next(op for op in emitter.ops if op.name == load.arguments[0])
    if not isinstance(load, Load) or load.guards:
        raise NotFusedError("an operand is computed in the group")
    row_step, step = (load.index.coefficient(str(e)) for e in index[-2:])
    if row_step is not None and step is not None:
        start = add(load.index, scale(index[-2], -row_step), scale(index[-1], -step))
        if start.variables <= {BATCH}:
            names = [name for name, _ in fusion.body.inputs]
            return Operand(names.index(load.buffer), start, row_step, step)
    raise NotFusedError("an operand is not stored in rows")


def print_finish(fusion: Fusion, product: Primitive, epilogue: Epilogue) -> tuple[str, ...]:
    """Return what is done with results n to n + W - 1 of row m of batch i, given as `y`."""
    matrices = matrices_of(fusion.body, product)
    emitter = fusion.emitter(matrices.ranges)
    stores = fusion.outputs(emitter, product, matrices.out, RESULT)
    names = {RESULT: RESULT}
    lines = epilogue.lines(emitter.ops, names)
    is_single = matrices.out[-1] == ZERO  # one column: vectors have one element
    lines += [epilogue.store(buffer, place, names[name], is_single) for buffer, _, place, name in stores]
    return tuple(lines)


def epilogue_of(group: Group, lanes: int) -> Epilogue:
    """Return a printer of what follows a group's products, in vectors of neighbouring columns."""

    def step(expr: Expr) -> int | None:
        return vector_step(expr, COLUMN, lanes)

    return Epilogue(group, step)
