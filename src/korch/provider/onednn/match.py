"""Expresses a group as one oneDNN primitive with post-operations, or returns the reason why that is impossible.

ONNX propagates NaN and infinity; some functions of oneDNN do not: relu, clip, max, min and max pooling
replace NaN by the bound, exp turns NaN into infinity, gelu turns infinity into NaN, and relu after plain
gemm turns -infinity into NaN. With `propagate_nan`, only functions that agree with ONNX on all inputs are
used; relu then becomes an elu of slope 0, which costs an exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import PadAttributes, ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.reduce import PoolAttributes
from korch.primitive.types import DType
from korch.provider.onednn.call import Dims, Eltwise
from korch.provider.onednn.pattern import find_activation


@dataclass(frozen=True, slots=True)
class Other:
    """A post-operation with a second operand: an input of the group, whose dims are extended to the output's rank."""

    kind: str
    input: int
    dims: Dims


@dataclass(frozen=True, slots=True)
class MatrixView:
    """The view of a plain tensor that a matrix product reads or writes: a reshape and a permutation of axes."""

    shape: Dims  # the tensor's shape after the reshape
    perm: Dims  # axis i of the matrix product is axis perm[i] of the shape


@dataclass(frozen=True, slots=True)
class OneDnnOp:
    """A primitive in oneDNN's terms."""

    op: str  # conv, conv_transpose, matmul, pool_max, pool_average, or reorder
    primitive: Primitive | None  # its main primitive; None for a reorder
    inputs: tuple[int, ...]  # the positions of its own inputs among the group's inputs
    views: tuple[MatrixView, ...] = ()  # for a matrix product, the views of its operands and of its result
    pads_begin: Dims = ()  # zeros before each spatial axis, in addition to the primitive's own pads
    pads_end: Dims = ()  # zeros after each spatial axis, in addition to the primitive's own pads
    bias: int | None = None  # the input position of a bias, or None
    post: tuple[Eltwise | Other, ...] = ()  # post-operations in order


UNARY = {
    "sigmoid": Eltwise("logistic"),
    "tanh": Eltwise("tanh"),
    "exp": Eltwise("exp"),
    "abs": Eltwise("abs"),
    "sqrt": Eltwise("sqrt"),
    "log": Eltwise("log"),
    "neg": Eltwise("linear", -1.0),
}
BINARY = ("add", "mul", "sub", "div", "max", "min")
ANCHORS = ("conv", "conv_transpose", "matmul", "pool_max", "pool_sum")
MOST_POST = 16
_CHANGES_NAN = ("clip", "exp", "gelu_erf", "max", "min")


def match_group(group: Group, propagate_nan: bool = False) -> OneDnnOp | Refusal:
    """Return a group in oneDNN's terms."""
    body = group.body
    if len(group.outputs) != 1:
        return Refusal("oneDNN primitives have one output")
    if any(t.dtype is not DType.F32 for t in (*group.input_types, *group.output_types)):
        return Refusal("only float32 is offered")
    if any(0 in type_.shape for type_ in body.types):
        return Refusal("a tensor is empty")
    if group.is_layout_change:
        return OneDnnOp("reorder", None, (0,))
    anchors = [p for p in body.primitives if p.op in ANCHORS]
    if len(anchors) != 1:
        return Refusal("there is not one convolution, matrix product or pooling")
    found = _Matcher(group).match(anchors[0])
    if isinstance(found, OneDnnOp) and len(found.post) > MOST_POST:
        return Refusal(f"there are more than {MOST_POST} post-operations")
    if isinstance(found, OneDnnOp) and propagate_nan:
        return _propagating(found)
    return found


def _propagating(found: OneDnnOp) -> OneDnnOp | Refusal:
    if found.op == "pool_max":
        return Refusal("pool_max loses NaN")
    post = []
    for operation in found.post:
        if operation.kind in _CHANGES_NAN:
            return Refusal(f"{operation.kind} loses NaN or infinity")
        is_relu = isinstance(operation, Eltwise) and operation == Eltwise("relu")
        post.append(Eltwise("elu") if is_relu else operation)
    return replace(found, post=tuple(post))


@dataclass
class _Matcher:
    group: Group
    used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.body = self.group.body
        self.position = self.group.position

    def match(self, anchor: Primitive) -> OneDnnOp | Refusal:
        self.used.add(anchor.output)
        found = self._operands(anchor)
        if isinstance(found, Refusal):
            return found
        value = anchor.output
        if isinstance(anchor.attributes, PoolAttributes):
            window = self._window(anchor, anchor.attributes)
            if isinstance(window, Refusal):
                return window
            op, value = window
            found = replace(found, op=op)
        end = self.body.outputs[0][1]
        while value != end:
            if anchor.op == "matmul" and self._moves(value):
                break
            step = self._step(value, self.body.types[anchor.output].shape)
            if isinstance(step, Refusal):
                return step
            operations, value = step
            for operation in operations:
                found = self._append(found, operation)
        if anchor.op == "matmul":
            value, view = self._result(value)
            found = replace(found, views=(*found.views, view))
        if value != end or len(self.used) != len(self.body.primitives):
            return Refusal("a primitive is not part of the chain")
        return found

    def _append(self, found: OneDnnOp, operation: Eltwise | Other) -> OneDnnOp:
        if isinstance(operation, Other):
            if not found.post and found.bias is None and self._is_bias(operation, found):
                return replace(found, bias=operation.input)
            return replace(found, post=(*found.post, operation))
        last = found.post[-1] if found.post else None
        if isinstance(last, Eltwise) and last.kind == operation.kind == "clip":
            low, high = max(last.alpha, operation.alpha), min(last.beta, operation.beta)
            if low <= high:
                return replace(found, post=(*found.post[:-1], Eltwise("clip", low, high)))
        # A relu is faster than a clip without an upper bound. A relu followed by an upper bound becomes one clip.
        if operation.kind == "clip" and last == Eltwise("relu") and operation.beta >= 0:
            return replace(found, post=(*found.post[:-1], Eltwise("clip", 0.0, operation.beta)))
        return replace(found, post=(*found.post, operation))

    def _operands(self, anchor: Primitive) -> OneDnnOp | Refusal:
        """Return the match of the anchor alone, including the pads or the views (reshapes, transposes) before it."""
        inputs: list[int] = []
        views: list[MatrixView] = []
        spatial = self.body.types[anchor.inputs[0]].rank - 2
        begin, end = (0,) * spatial, (0,) * spatial
        for i, value in enumerate(anchor.inputs):
            if anchor.op == "matmul":
                value, view = self._view(value)
                views.append(view)
            maker = self._producer(value)
            if maker is not None and isinstance(maker.attributes, PadAttributes):
                pads = maker.attributes
                is_zero = pads.mode == "constant" and pads.value == 0
                is_spatial = not any((*pads.before[:2], *pads.after[:2]))
                if anchor.op != "conv" or i or not is_zero or not is_spatial:
                    return Refusal("the pad before it is not of zeros on spatial axes only")
                if len(self.body.consumers[value]) > 1:
                    return Refusal("the pad before it is read elsewhere too")
                begin, end = pads.before[2:], pads.after[2:]
                self.used.add(value)
                value = maker.inputs[0]
            if value not in self.position:
                return Refusal(f"operand {i} is computed in the group, or uniform")
            inputs.append(self.position[value])
        return OneDnnOp(anchor.op, anchor, tuple(inputs), tuple(views), begin, end)

    def _view(self, value: int) -> tuple[int, MatrixView]:
        """Return the value that a matrix product reads through reshapes and then transposes, and the view."""
        perm = tuple(range(self.body.types[value].rank))
        maker = self._producer(value)
        while maker is not None and isinstance(maker.attributes, TransposeAttributes):
            self.used.add(value)
            perm = tuple(maker.attributes.perm[axis] for axis in perm)
            value = maker.inputs[0]
            maker = self._producer(value)
        view = MatrixView(self.body.types[value].shape, perm)
        while maker is not None and isinstance(maker.attributes, ReshapeAttributes):
            self.used.add(value)
            value = maker.inputs[0]
            maker = self._producer(value)
        return value, view

    def _result(self, value: int) -> tuple[int, MatrixView]:
        """Return the output that a matrix product writes through transposes and then reshapes, and the view."""
        perm = tuple(range(self.body.types[value].rank))
        reader = self._only_reader(value)
        while reader is not None and isinstance(reader.attributes, TransposeAttributes):
            value = reader.output
            self.used.add(value)
            perm = tuple(perm[axis] for axis in reader.attributes.perm)
            reader = self._only_reader(value)
        # Axis i of the output is axis perm[i] of the product; a view holds the inverse permutation.
        view = MatrixView(self.body.types[value].shape, tuple(perm.index(i) for i in range(len(perm))))
        while reader is not None and isinstance(reader.attributes, ReshapeAttributes):
            value = reader.output
            self.used.add(value)
            reader = self._only_reader(value)
        return value, view

    def _moves(self, value: int) -> bool:
        reader = self._only_reader(value)
        return reader is not None and reader.op in ("transpose", "reshape")

    def _only_reader(self, value: int) -> Primitive | None:
        readers = self.body.consumers[value]
        return self.body.primitives[readers[0]] if len(readers) == 1 else None

    def _producer(self, value: int) -> Primitive | None:
        producers = self.body.producers[value]
        return self.body.primitives[producers[0]] if producers else None

    def _scalar(self, value: int) -> float | None:
        constant = self.body.constants.get(value)
        return float(constant.scalar) if constant is not None else None

    def _window(self, anchor: Primitive, window: PoolAttributes) -> tuple[str, int] | Refusal:
        """Return the kind of pooling and the value of its result."""
        sizes = self.body.types[anchor.inputs[0]].shape
        counts = self.body.types[anchor.output].shape
        if len(window.kernel) != len(sizes) - 2:
            return Refusal("the windows are not on all axes but the first two")
        if anchor.op == "pool_max":
            if any(_sees_only_pads(sizes[2 + i], counts[2 + i], window, i) for i in range(len(window.kernel))):
                return Refusal("a window lies in the pads")
            return "pool_max", anchor.output
        readers = self.body.reading(anchor.output)
        if len(readers) == 1 and readers[0].inputs[0] == anchor.output:
            reader, size = readers[0], math.prod(window.kernel)
            factor = self._scalar(reader.inputs[1]) if len(reader.inputs) == 2 else None
            if (reader.op, factor) in (("div", float(size)), ("mul", float(np.float32(1 / size)))):
                self.used.add(reader.output)
                return "pool_average", reader.output
        return Refusal("a sum over windows is not an average")

    def _step(self, value: int, shape: Sequence[int]) -> tuple[tuple[Eltwise | Other, ...], int] | Refusal:
        """Return the post-operations that the reader of a value stands for, and the value that they compute."""
        activation = find_activation(self.body, value)
        if activation is not None:
            self.used |= activation.used
            return (activation.operation,), activation.output
        readers = self.body.reading(value)
        if len(readers) != 1:
            return Refusal("a value of the chain is read twice")
        reader = readers[0]
        self.used.add(reader.output)
        if reader.op in UNARY:
            return (UNARY[reader.op],), reader.output
        if len(reader.inputs) != 2:
            return Refusal(f"{reader.op} is not a post-operation")
        is_left = reader.inputs[0] == value
        other = reader.inputs[1 if is_left else 0]
        number = self._scalar(other)
        if number is not None:
            operation = _with_number(reader.op, number, is_left)
            if operation is None:
                return Refusal(f"{reader.op} with {number:g} is not a post-operation")
            return (operation,), reader.output
        if reader.op not in BINARY or (not is_left and reader.op == "div"):
            return Refusal(f"{reader.op} is not a post-operation")
        found = self._broadcast_input(other, len(shape))
        if found is None:
            return Refusal(f"the other operand of {reader.op} is computed in the group")
        if not is_left and reader.op == "sub":
            return (Eltwise("linear", -1.0), Other("add", *found)), reader.output
        return (Other(reader.op, *found),), reader.output

    def _broadcast_input(self, value: int, rank: int) -> tuple[int, Dims] | None:
        """Return the input position and dims of an operand that is an input or a broadcast of one, else None."""
        maker = self._producer(value)
        if maker is not None and maker.op == "broadcast":
            self.used.add(value)
            value = maker.inputs[0]
        if value not in self.position:
            return None
        shape = self.body.types[value].shape
        return self.position[value], (1,) * (rank - len(shape)) + shape

    def _is_bias(self, operation: Other, found: OneDnnOp) -> bool:
        if found.primitive is None or operation.kind != "add":
            return False
        shape = self.body.types[found.primitive.output].shape
        axis = len(shape) - 1 if found.op == "matmul" else 1
        wanted = tuple(n if i == axis else 1 for i, n in enumerate(shape))
        return found.op in ("conv", "conv_transpose", "matmul") and operation.dims == wanted


def _with_number(op: str, number: float, is_left: bool) -> Eltwise | None:
    if not math.isfinite(number):
        return None
    match op:
        case "max":
            return Eltwise("relu") if number == 0 else Eltwise("clip", number, math.inf)
        case "min":
            return Eltwise("clip", -math.inf, number)
        case "add":
            return Eltwise("linear", 1.0, number)
        case "sub":
            return Eltwise("linear", 1.0, -number) if is_left else Eltwise("linear", -1.0, number)
        case "mul":
            return Eltwise("linear", number)
        case "div" if is_left and number and abs(math.frexp(number)[0]) == 0.5:
            return Eltwise("linear", 1.0 / number)  # exact
    return None


def _sees_only_pads(size: int, count: int, window: PoolAttributes, i: int) -> bool:
    """Return whether some window along a spatial axis has no tap on the input."""
    taps = [k * window.dilations[i] for k in range(window.kernel[i])]
    starts = (o * window.strides[i] - window.pads_begin[i] for o in range(count))
    return any(not any(0 <= start + tap < size for tap in taps) for start in starts)
