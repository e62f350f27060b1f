"""Group -> one matrix product, how its operands lie, and a C++ function of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.candidate.candidate import Group, Refusal
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.op import Array, Category
from korch.primitive.types import DType
from korch.provider.gemm.place import Addresses, Offsets, place_by_number, place_of_matrices
from korch.provider.vector import call, literal

MOVES = ("transpose", "reshape", "slice")

Layouts = tuple[tuple[Layout, ...], tuple[Layout, ...]]
"""The layouts of the inputs and of the outputs, all without blocks."""


@dataclass(frozen=True, eq=False)
class Operand:
    """A matrix that the product reads: the input's position, and the steps from there."""

    position: int
    steps: tuple[Primitive, ...]


@dataclass(frozen=True, eq=False)
class Product:
    """A product and its operands; what follows it is looked at when the kernel is printed."""

    primitive: Primitive
    a: Operand
    b: Operand
    after: tuple[Primitive, ...]


def match_group(group: Group) -> Product | Refusal:
    """Return what a group is, or why it is not a matrix product."""
    body = group.body
    found = body.linear
    if [p.op for p in found] != ["matmul"]:
        return Refusal("it is not one matrix product")
    if any(type_.dtype is not DType.F32 for type_ in body.types):
        return Refusal("the elements are not all float32")
    product = found[0]
    sides = [operand_of(group, value) for value in product.inputs]
    for side in sides:
        if isinstance(side, Refusal):
            return side
    a, b = (side for side in sides if isinstance(side, Operand))
    before = {id(step) for operand in (a, b) for step in operand.steps}
    after = tuple(p for p in body.primitives if id(p) not in before and p is not product)
    for primitive in after:
        is_known = primitive.row.category is Category.ELEMENTWISE or primitive.op == "broadcast"
        if not is_known and primitive.op not in MOVES:
            return Refusal(f"{primitive.op} is not fused into the product")
    return Product(product, a, b, after)


def operand_of(group: Group, value: int) -> Operand | Refusal:
    """Return what a matrix of a product is made of, if it is an input that only was moved."""
    position = group.position
    steps: list[Primitive] = []
    while value not in position:
        makers = [p for p in group.body.primitives if p.output == value and p.op in MOVES]
        if not makers:
            return Refusal("an operand is computed in the group")
        steps.append(makers[0])
        value = makers[0].inputs[0]
    return Operand(position[value], tuple(reversed(steps)))


def operand_place(group: Group, product: Primitive, operand: Operand, layouts: Layouts) -> Offsets | Refusal:
    """Return where an operand's elements lie, as [batch, row, column]."""
    shape = group.input_types[operand.position].shape
    addresses = Addresses(shape, layouts[0][operand.position]).after(*operand.steps)
    place = place_of_matrices(addresses, group.body.types[product.output].shape[:-2])
    return place if place is not None else Refusal("an operand is not stored in rows")


@dataclass(frozen=True, eq=False)
class Finish:
    """The lines of a function of W results, the tables that they read, and where it stores.

    `place` is the address of the first output; "" if none is stored.
    """

    lines: tuple[str, ...]
    tables: tuple[tuple[str, Array], ...]
    place: str = ""


def print_finish(group: Group, match: Product, layouts: Layouts) -> Finish | Refusal:
    """Return what is done with results n to n + W - 1 of row m of batch i, given as `y`."""
    finisher = Finisher(group, match.primitive, layouts)
    return finisher.follow(match.after) or finisher.stores()


class Finisher:
    """Prints the steps after a product.

    `numbers` has, for a value that is computed, which result of the product each element is; what
    is read beside it is addressed by the same numbers.
    """

    def __init__(self, group: Group, product: Primitive, layouts: Layouts, tables: str = "t") -> None:
        self.body = group.body
        self.layouts = layouts
        self.prefix = tables
        shape = self.body.types[product.output].shape
        rows, columns = shape[-2:]
        self.shape = (int(np.prod(shape[:-2])), rows, columns)
        self.position = group.position
        self.names = {product.output: "y"}
        self.numbers = {product.output: Addresses(shape)}
        self.beside: dict[int, Addresses] = {}  # broadcasts of inputs
        self.source: dict[int, int] = {}
        self.tables: dict[str, Array] = {}
        self.lines: list[str] = []

    def follow(self, steps: Sequence[Primitive]) -> Refusal | None:
        """Add the lines of primitives, each after what it reads."""
        for primitive in steps:
            refusal = self._step(primitive)
            if refusal is not None:
                return refusal
        return None

    def value(self, value: int) -> Finish | Refusal:
        """Return the lines so far, with one that returns a value in the order of the product."""
        shape = self.body.types[value].shape
        if value not in self.names or not self.numbers[value].is_same(Addresses(shape)):
            return Refusal("a value is not computed from the product in its order")
        lines = (*self.lines, f"return {self.names[value]};")
        return Finish(lines, tuple(self.tables.items()))

    def stores(self) -> Finish | Refusal:
        """Return the lines so far, with those that write the group's outputs."""
        places: list[str] = []
        for i, (_, value) in enumerate(self.body.outputs):
            if value not in self.names:
                return Refusal("an output is not computed from the product")
            addresses = Addresses(self.body.types[value].shape, self.layouts[1][i])
            at = self._address(addresses, self.numbers[value])
            if isinstance(at, Refusal) or at[1] != 1:
                return Refusal("the columns of an output are not adjacent in memory")
            out = f"static_cast<float*>(buffers[{len(self.body.inputs) + i}]) + {at[0]}"
            self.lines.append(f"korch::store<float, W>({out}, {self.names[value]});")
            places.append(out)
        return Finish(tuple(self.lines), tuple(self.tables.items()), places[0])

    def _step(self, p: Primitive) -> Refusal | None:
        value = p.inputs[0]
        if p.op in (*MOVES, "broadcast") and value not in self.names:
            known = self.beside.get(value)
            if known is None:
                constant = self.body.constants.get(value)
                if constant is not None and constant.is_uniform:
                    self.names[p.output] = literal(float(constant.scalar))
                    return None
                if value not in self.position:
                    return Refusal(f"{p.op} is not fused into the product")
                known = self._read(value)
                self.source[value] = self.position[value]
            self.beside[p.output] = known.after(p)
            self.source[p.output] = self.source[value]
            return None
        if p.op in MOVES and value in self.numbers:
            if self.body.types[p.output].size != self.body.types[value].size:
                return Refusal("a slice leaves out results of the product")
            self.names[p.output] = self.names[value]
            self.numbers[p.output] = self.numbers[value].after(p)
            return None
        if p.row.category is not Category.ELEMENTWISE:
            return Refusal(f"{p.op} is not fused into the product")
        numbers = next((self.numbers[v] for v in p.inputs if v in self.numbers), None)
        if numbers is None:
            return Refusal(f"{p.op} does not read the product")
        arguments = [self._argument(v, numbers) for v in p.inputs]
        known_arguments = [a for a in arguments if isinstance(a, str)]
        if len(known_arguments) < len(arguments):
            return Refusal(f"an operand of {p.op} is not fused into the product")
        name = f"t{len(self.lines)}"
        self.lines.append(f"const korch::Vec<float, W> {name} = {call(p.op, known_arguments)};")
        self.names[p.output], self.numbers[p.output] = name, numbers
        return None

    def _argument(self, value: int, numbers: Addresses) -> str | Refusal:
        if value in self.numbers:
            same = self.numbers[value].is_same(numbers)
            return self.names[value] if same else Refusal("operands have the results in different orders")
        if value in self.names:
            return self.names[value]
        constant = self.body.constants.get(value)
        if constant is not None:
            found = literal(float(constant.scalar)) if constant.is_uniform else None
            return found or Refusal("a constant is not uniform")
        addresses = self.beside.get(value)
        if addresses is None:
            if value not in self.position:
                return Refusal("an operand is computed beside the product")
            self.source[value] = self.position[value]
            addresses = self._read(value)
        at = self._address(addresses, numbers)
        if isinstance(at, Refusal):
            return at
        text, step = at
        pointer = f"static_cast<const float*>(buffers[{self.source[value]}]) + {text}"
        if step == 1:
            return f"korch::load<float, W>({pointer})"
        return f"korch::splat<float, W>(*({pointer}))"

    def _read(self, value: int) -> Addresses:
        """Return the addresses of an input's elements."""
        layout = self.layouts[0][self.position[value]]
        return Addresses(self.body.types[value].shape, layout)

    def _address(self, addresses: Addresses, numbers: Addresses) -> tuple[str, int] | Refusal:
        """Return the address of result (i, m, n) as C++, and the step between columns, 0 or 1."""
        place = place_by_number(addresses, numbers, self.shape)
        if place is None:
            return Refusal("a tensor is not stored in rows")
        steps = np.diff(place.offsets[2])
        lanes = 16  # whole vectors begin at multiples of it
        inside = np.arange(len(steps)) % lanes != lanes - 1
        step = int(steps[0]) if len(steps) else 1
        if step not in (0, 1) or not bool((steps[inside] == step).all()):
            return Refusal("the columns of a tensor are not adjacent in memory")
        if step == 0 and bool(place.offsets[2].any()):
            return Refusal("the columns of a tensor are not adjacent in memory")
        return " + ".join(
            filter(None, (self._offset(place, axis, name) for axis, name in enumerate(("i", "m", "n"))))
        ) or "0", step

    def _offset(self, place: Offsets, axis: int, name: str) -> str:
        text = place.text(axis, name)
        if text is not None:
            return text
        offsets = place.offsets[axis]
        table = next(
            (t for t, known in self.tables.items() if np.array_equal(known, offsets)),
            f"NAME_{self.prefix}{len(self.tables)}",
        )
        self.tables[table] = offsets
        return f"{table}[{name}]"
