"""Group -> what oneDNN calls it: one primitive with post-operations, or the reason why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import PadAttributes, TransposeAttributes
from korch.primitive.types import DType


@dataclass(frozen=True, slots=True)
class Eltwise:
    """A post-operation on each element."""

    kind: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class Binary:
    """A post-operation with another tensor: an input, of `dims` that broadcast to the output's."""

    kind: str
    input: int
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """A primitive in oneDNN's terms.

    Attributes:
        op: conv, conv_transpose, matmul, pool_max, pool_average, or reorder.
        primitive: the primitive at its heart; None for a reorder.
        inputs: positions of its own inputs in the group's.
        transposed: for a matrix product, which operands are read transposed.
        pads_begin: zeros before each spatial axis beyond the primitive's own pads.
        pads_end: zeros after each spatial axis.
        bias: the input position of a bias, or None.
        post: post-operations in order.
    """

    op: str
    primitive: Primitive | None
    inputs: tuple[int, ...]
    transposed: tuple[bool, ...] = ()
    pads_begin: tuple[int, ...] = ()
    pads_end: tuple[int, ...] = ()
    bias: int | None = None
    post: tuple[Eltwise | Binary, ...] = ()


UNARY = {"sigmoid": "logistic", "tanh": "tanh", "exp": "exp", "abs": "abs", "sqrt": "sqrt"}
BINARY = {"add": "add", "mul": "mul", "sub": "sub", "div": "div"}
HEARTS = ("conv", "conv_transpose", "matmul", "pool_max", "pool_sum")


def match_group(group: Group) -> Match | Refusal:
    """Return a group in oneDNN's terms."""
    if any(type_.dtype is not DType.F32 for type_ in group.body.types):
        return Refusal("only float32 is offered")
    if len(group.outputs) != 1:
        return Refusal("oneDNN primitives have one output")
    if any(0 in type_.shape for type_ in group.body.types):
        return Refusal("a tensor is empty")
    if group.is_layout_change:
        return Match("reorder", None, (0,))
    hearts = [p for p in group.body.primitives if p.op in HEARTS]
    if len(hearts) != 1:
        return Refusal("there is not one convolution, matrix product or pooling")
    return _Matcher(group).match(hearts[0])


@dataclass
class _Matcher:
    group: Group
    used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.body = self.group.body
        self.position = {value: i for i, (_, value) in enumerate(self.body.inputs)}

    def match(self, heart: Primitive) -> Match | Refusal:
        self._use(heart)
        found = self._operands(heart)
        if isinstance(found, Refusal):
            return found
        value = heart.output
        if heart.op == "pool_sum":
            average = self._average(heart)
            if average is None:
                return Refusal("a sum over windows is not an average")
            value = average
            found = replace(found, op="pool_average")
        end = self.body.outputs[0][1]
        while value != end:
            step = self._step(value, self.body.types[heart.output].shape)
            if isinstance(step, Refusal):
                return step
            operation, value = step
            is_bias = isinstance(operation, Binary) and operation.kind == "add"
            if (
                is_bias
                and not found.post
                and found.bias is None
                and self._is_bias(operation, found)
            ):
                found = replace(found, bias=operation.input)  # type: ignore[union-attr]
            else:
                found = replace(found, post=(*found.post, operation))
        if len(self.used) != len(self.body.primitives):
            return Refusal("a primitive is not part of the chain")
        return found

    def _use(self, primitive: Primitive) -> None:
        self.used.add(primitive.output)

    def _operands(self, heart: Primitive) -> Match | Refusal:
        """Return the match of the heart alone, with pads and transposes before it taken in."""
        inputs: list[int] = []
        transposed: list[bool] = []
        spatial = self.body.types[heart.inputs[0]].rank - 2
        begin, end = (0,) * spatial, (0,) * spatial
        for i, value in enumerate(heart.inputs):
            is_transposed = False
            maker = self._producer(value)
            if maker is not None and isinstance(maker.attributes, PadAttributes):
                pads = maker.attributes
                is_zero = pads.mode == "constant" and pads.value == 0
                if heart.op != "conv" or i or not is_zero or any((*pads.before[:2],
                                                                  *pads.after[:2])):  # fmt: skip
                    return Refusal("a pad before it is not of zeros on spatial axes")
                begin, end = pads.before[2:], pads.after[2:]
                self._use(maker)
                value = maker.inputs[0]
            elif maker is not None and isinstance(maker.attributes, TransposeAttributes):
                perm = maker.attributes.perm
                swapped = (*range(len(perm) - 2), len(perm) - 1, len(perm) - 2)
                if heart.op != "matmul" or perm != swapped:
                    return Refusal("a transpose before it is not one of a matrix product's operand")
                is_transposed = True
                self._use(maker)
                value = maker.inputs[0]
            if value not in self.position:
                return Refusal(f"operand {i} is computed in the group")
            inputs.append(self.position[value])
            transposed.append(is_transposed)
        return Match(heart.op, heart, tuple(inputs), tuple(transposed), begin, end)

    def _producer(self, value: int) -> Primitive | None:
        producers = self.body.producers[value]
        return self.body.primitives[producers[0]] if producers else None

    def _scalar(self, value: int) -> float | None:
        constant = self.body.constants.get(value)
        return float(constant.scalar) if constant is not None else None

    def _average(self, heart: Primitive) -> int | None:
        """Return the value of the average if the sum is divided by the windows' size."""
        readers = self.body.consumers[heart.output]
        if len(readers) != 1:
            return None
        reader = self.body.primitives[readers[0]]
        size = math.prod(heart.attributes.kernel)  # type: ignore[attr-defined]
        factor = self._scalar(reader.inputs[1]) if len(reader.inputs) == 2 else None
        if (reader.op, factor) not in (("div", float(size)), ("mul", 1.0 / size)):
            return None
        self._use(reader)
        return reader.output

    def _step(self, value: int, shape: Sequence[int]) -> tuple[Eltwise | Binary, int] | Refusal:
        """Return the post-operation that reads a value of the chain, and its result."""
        readers = [self.body.primitives[p] for p in self.body.consumers[value]]
        if len(readers) == 2:
            gate = next((p for p in readers if p.op == "sigmoid"), None)
            product = next((p for p in readers if p.op == "mul"), None)
            if gate is None or product is None or set(product.inputs) != {value, gate.output}:
                return Refusal("a value of the chain is read twice")
            self._use(gate)
            self._use(product)
            return Eltwise("swish", 1.0), product.output
        if len(readers) != 1:
            return Refusal("the chain does not end in the output")
        reader = readers[0]
        self._use(reader)
        if reader.op in UNARY:
            return Eltwise(UNARY[reader.op]), reader.output
        if len(reader.inputs) != 2:
            return Refusal(f"{reader.op} is no post-operation")
        is_left = reader.inputs[0] == value
        other = reader.inputs[1 if is_left else 0]
        number = self._scalar(other)
        if number is not None:
            operation = _with_number(reader.op, number, is_left)
            if operation is None:
                return Refusal(f"{reader.op} with {number:g} is no post-operation")
            return operation, reader.output
        if reader.op not in BINARY or (not is_left and reader.op in ("sub", "div")):
            return Refusal(f"{reader.op} is no post-operation")
        dims = self._broadcast_input(other, len(shape))
        if dims is None:
            return Refusal(f"the other operand of {reader.op} is computed in the group")
        return Binary(BINARY[reader.op], *dims), reader.output

    def _broadcast_input(self, value: int, rank: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the input position and dims of an operand, a broadcast taken in."""
        maker = self._producer(value)
        if maker is not None and maker.op == "broadcast":
            self._use(maker)
            value = maker.inputs[0]
        if value not in self.position:
            return None
        shape = self.body.types[value].shape
        return self.position[value], (1,) * (rank - len(shape)) + shape

    def _is_bias(self, operation: Eltwise | Binary, found: Match) -> bool:
        if not isinstance(operation, Binary) or found.primitive is None:
            return False
        shape = self.body.types[found.primitive.output].shape
        axis = len(shape) - 1 if found.op == "matmul" else 1
        wanted = tuple(n if i == axis else 1 for i, n in enumerate(shape))
        return found.op in ("conv", "conv_transpose", "matmul") and operation.dims == wanted


def _with_number(op: str, number: float, is_left: bool) -> Eltwise | None:
    match op:
        case "max" if number == 0:
            return Eltwise("relu")
        case "add":
            return Eltwise("linear", 1.0, number)
        case "sub" if is_left:
            return Eltwise("linear", 1.0, -number)
        case "mul":
            return Eltwise("linear", number)
        case "div" if is_left and number and math.frexp(number)[0] in (0.5, -0.5):
            return Eltwise("linear", 1.0 / number)
    return None
