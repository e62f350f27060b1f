"""Translates primitives to ONNX nodes with the same meaning, for exported plans and for other engines."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.version_converter
from onnx import helper

from korch.errors import UnsupportedError
from korch.primitive.graph import Constant, Primitive, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import ONNX_NAMES, CastAttributes
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.ops.opaque import OpaqueAttributes, onnx_type, opaque_model
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes, identity
from korch.primitive.ops.state import WriteAttributes
from korch.primitive.ops.stored import GROUP, LEAST, MOST, StoredAttributes
from korch.primitive.ops.winograd import TRANSFORMS, WinogradAttributes, tile_counts
from korch.primitive.reference import body_of
from korch.primitive.types import DType, ValueType

OPSET = 20
IR_VERSION = 10
INLINE_BYTES = 1024
"""Larger constants of a model are initializers."""

# ONNX has no rounding to TF32; TensorRT rounds the factors of products itself.
_SAME = {**ONNX_NAMES, "round_tf32": "Identity", "where": "Where", "matmul": "MatMul"}
_REDUCE = {"reduce_sum": "ReduceSum", "reduce_prod": "ReduceProd", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin"}
_POOL = {"pool_sum": "Add", "pool_prod": "Mul", "pool_max": "Max", "pool_min": "Min"}


class OnnxNodes:
    """Writes the ONNX nodes of a graph of primitives.

    Attributes:
        body: the graph.
        where: the graph's name in messages.
        prefix: what the names of values begin with.
        opsets: the version of each domain whose operators the nodes have.
    """

    def __init__(self, body: PrimitiveGraph, where: str, prefix: str = "") -> None:
        self.body = body
        self.where = where
        self.prefix = prefix
        self.made: list[onnx.NodeProto] = []
        self.opsets = {"": OPSET}
        self.opaque_outputs: dict[tuple[str, ...], dict[int, str]] = {}
        self.names = {value: name for name, value in body.inputs}
        self.count = 0

    def nodes(self) -> list[onnx.NodeProto]:
        """Return the nodes that compute the graph's named outputs from its named inputs.

        Raises:
            UnsupportedError: a primitive has no ONNX form; the message names it.
        """
        body = self.body
        for value, constant in body.constants.items():
            self.names[value] = self.constant(value, constant)
        for p, primitive in enumerate(body.primitives):
            begin = len(self.made)
            self.names[primitive.output] = self.primitive(primitive)
            for node in self.made[begin:] if body.origins else ():
                node.doc_string = body.origins[p]
        for name, value in body.outputs:
            self.made.append(helper.make_node("Identity", [self.names[value]], [name]))
        return self.made

    def model(self) -> onnx.ModelProto:
        """Return the graph as a model with the same inputs and outputs; nodes have their origins as documentation.

        Raises:
            UnsupportedError: as `nodes`.
        """
        while any(name.startswith(self.prefix + "t") for name, _ in (*self.body.inputs, *self.body.outputs)):
            self.prefix += "_"

        def described(named: Sequence[tuple[str, int]]) -> list[onnx.ValueInfoProto]:
            types = ((name, self.body.types[value]) for name, value in named)
            return [helper.make_tensor_value_info(name, onnx_type(t.dtype), t.shape) for name, t in types]

        kept, initializers = [], []
        for node in self.nodes():
            tensor = node.attribute[0].t if node.op_type == "Constant" else None
            if tensor is None or len(tensor.raw_data) <= INLINE_BYTES:
                kept.append(node)
            else:
                tensor.name = node.output[0]
                initializers.append(tensor)
        graph = helper.make_graph(
            kept, "graph", described(self.body.inputs), described(self.body.outputs), initializers
        )
        made: onnx.ModelProto = helper.make_model(
            graph, opset_imports=[helper.make_opsetid(*item) for item in self.opsets.items()], ir_version=IR_VERSION
        )
        return made

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        self.count += 1
        name = f"{self.prefix}t{self.count}"
        self.made.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def constant(self, value: int, constant: Constant) -> str:
        """Add one of the graph's constants; return its name."""
        return self.literal(constant.array, self.body.types[value].dtype)

    def literal(self, array: Array, dtype: DType) -> str:
        """Add a constant with the elements of `array`; return its name."""
        uniform = array.size > 1 and not any(array.strides)
        if uniform:
            one = self.add("Constant", [], value=onnx_tensor("one", array.reshape(-1)[:1], dtype))
            return self.add("Expand", [one, self.integers(array.shape)])
        return self.add("Constant", [], value=onnx_tensor("value", array, dtype))

    def integers(self, values: Sequence[int]) -> str:
        """Add a constant of 64-bit integers; return its name."""
        return self.literal(np.array(values, np.int64).reshape(-1), DType.I64)

    def primitive(self, p: Primitive) -> str:
        """Add the nodes of a primitive; return the name of its output."""
        inputs = [self.names[v] for v in p.inputs]
        types = [self.body.types[v] for v in p.inputs]
        out = self.body.types[p.output].dtype
        if p.op == "matmul" and types[0].dtype is not out:  # bytes; MatMulInteger is not exact in every runtime
            inputs = [self.add("Cast", [name], to=onnx_type(out)) for name in inputs]
        if p.op in ("max", "min") and out in (DType.I16, DType.U16):  # ONNX Runtime lacks these
            wide = [self.add("Cast", [name], to=onnx_type(DType.I32)) for name in inputs]
            return self.add("Cast", [self.add(_SAME[p.op], wide)], to=onnx_type(out))
        if p.op in _SAME:
            return self.add(_SAME[p.op], inputs)
        if p.op in ("mod", "shift_left", "shift_right", "matmul_gathered"):
            return self.without_attributes(p.op, inputs, types)
        match p.attributes:
            case CastAttributes(to):
                return self.add("Cast", inputs, to=onnx_type(DType(to)))
            case ReduceAttributes(axes) if p.op in _REDUCE:
                return self.add(_REDUCE[p.op], [inputs[0], self.integers(axes)], keepdims=1)
            case BroadcastAttributes(shape):
                return self.add("Expand", [inputs[0], self.integers(shape)])
            case ReshapeAttributes(shape):
                return self.add("Reshape", [inputs[0], self.integers(shape)], allowzero=1)
            case TransposeAttributes(()):
                return self.add("Identity", inputs)
            case TransposeAttributes(perm):
                return self.add("Transpose", inputs, perm=list(perm))
            case SliceAttributes(start, size, step):
                return self.slice(inputs[0], start, size, step)
            case PadAttributes(before, after, mode, fill):
                value = self.literal(np.array(fill, types[0].dtype.numpy), types[0].dtype)
                given = [value] if mode == "constant" else []
                pads = self.integers([*before, *after])
                return self.add("Pad", [inputs[0], pads, *given], mode=mode)
            case ConcatAttributes(axis):
                return self.add("Concat", inputs, axis=axis)
            case TakeAttributes(axis, indices):
                return self.add("Gather", [inputs[0], self.integers(indices)], axis=axis)
            case ConvAttributes(strides, begin, end, dilations, groups):
                op = "Conv" if types[0].dtype is out else "ConvInteger"
                return self.add(op, inputs, strides=strides, pads=[*begin, *end], dilations=dilations, group=groups)
            case PoolAttributes() if p.op in _POOL:
                return self.pool(p, inputs[0], types[0])
            case WinogradAttributes():
                return self.winograd(p, inputs, types)
            case WriteAttributes(axis):
                return self.written(axis, inputs, types)
            case StoredAttributes():
                return self.stored(p.attributes, inputs, types)
            case OpaqueAttributes():
                return self.opaque(p.attributes, inputs)
            case LoopAttributes():
                return self.loop(p.attributes, inputs)
        raise UnsupportedError(f"{p.op} has no ONNX form", where=self.where)

    def written(self, axis: int, inputs: Sequence[str], types: Sequence[ValueType]) -> str:
        """Add rows that replace others at positions, which are taken modulo their number."""
        first = [axis, *(i for i in range(types[0].rank) if i != axis)]
        whole, rows = (self.add("Transpose", [name], perm=first) for name in inputs[:2])
        count = self.literal(np.array(max(1, types[0].shape[axis]), np.int64), DType.I64)
        places = self.add("Unsqueeze", [self.add("Mod", [inputs[2], count]), self.integers([1])])
        found = self.add("ScatterND", [whole, places, rows])
        return self.add("Transpose", [found], perm=[first.index(i) for i in range(types[0].rank)])

    def without_attributes(self, op: str, inputs: Sequence[str], types: Sequence[ValueType]) -> str:
        """Add a primitive without attributes whose ONNX form has attributes or is several nodes."""
        if op == "mod":
            return self.add("Mod", inputs, fmod=int(types[0].dtype.is_float))
        if op == "matmul_gathered":
            return self.gathered(inputs, types)
        return self.add("BitShift", inputs, direction=op[6:].upper())

    def slice(self, name: str, start: Sequence[int], size: Sequence[int], step: Sequence[int]) -> str:
        """Add a slice of all axes."""
        ends = [s + n * k for s, n, k in zip(start, size, step, strict=True)]
        ends = [e if e >= 0 else np.iinfo(np.int64).min for e in ends]  # past the first element, backwards
        axes = range(len(start))
        return self.add("Slice", [name, *map(self.integers, (start, ends, axes, step))])

    def pool(self, p: Primitive, name: str, type_: ValueType) -> str:
        """Add a pooling as slices of the padded input, one for each tap of the window, combined one after another."""
        at = p.attributes
        if not isinstance(at, PoolAttributes):
            raise AssertionError("a pool without its attributes")
        op, fill = _POOL[p.op], identity(p.op.removeprefix("pool_"), type_.dtype)
        lead = type_.rank - len(at.kernel)
        if any((*at.pads_begin, *at.pads_end)):
            zeros = [0] * lead
            value = self.literal(np.array(fill, type_.dtype.numpy), type_.dtype)
            pads = self.integers([*zeros, *at.pads_begin, *zeros, *at.pads_end])
            name = self.add("Pad", [name, pads, value])
        out = self.body.types[p.output].shape
        found = ""
        for tap in itertools.product(*map(range, at.kernel)):
            start = [0] * lead + [t * d for t, d in zip(tap, at.dilations, strict=True)]
            part = self.slice(name, start, out, [*([1] * lead), *at.strides])
            found = self.add(op, [found, part]) if found else part
        return found

    def winograd(self, p: Primitive, inputs: Sequence[str], types: Sequence[ValueType]) -> str:
        """Add the transform as a depthwise convolution with a tile's stride, the products, and the back transform."""
        at = p.attributes
        if not isinstance(at, WinogradAttributes):
            raise AssertionError("winograd without its attributes")
        m, points, t = at.tile, (at.tile + 2) ** 2, TRANSFORMS[at.tile]
        (n, c, height, width), o = types[0].shape, types[1].shape[3]
        out = self.body.types[p.output].shape
        down, across = tile_counts(out, m)
        is_of_bytes = not types[0].dtype.is_float
        dtype = DType.F32 if is_of_bytes else types[0].dtype
        first, second = inputs
        if is_of_bytes:  # transformed tiles are exact in float32, and sums in float64
            first = self.add("Cast", [first], to=onnx.TensorProto.FLOAT)
            second = self.add("Cast", [second], to=onnx.TensorProto.DOUBLE)
        ends = [down * m + 2 - height - at.pads_begin[0], across * m + 2 - width - at.pads_begin[1]]
        x = self.add("Pad", [first, self.integers([0, 0, *at.pads_begin, 0, 0, *ends])])
        there = np.einsum("ai,bj->abij", t.data, t.data).reshape(points, 1, m + 2, m + 2)
        weights = np.tile(there, (c, 1, 1, 1)).astype(dtype.numpy)
        v = self.add("Conv", [x, self.literal(weights, dtype)], strides=[m, m], group=c)
        v = self.add("Reshape", [v, self.integers([n, c, points, down * across])])
        v = self.add("Transpose", [v], perm=[2, 0, 3, 1])  # axes: points, images, tiles, channels
        v = self.add("Reshape", [v, self.integers([points, n * down * across, c])])
        if is_of_bytes:
            v, dtype = self.add("Cast", [v], to=onnx.TensorProto.DOUBLE), DType.F64
        u = self.add("Reshape", [second, self.integers([points, c, o])])
        y = self.add("MatMul", [v, u])
        y = self.add("Reshape", [y, self.integers([points, n, down, across, o])])
        y = self.add("Transpose", [y], perm=[1, 4, 2, 3, 0])
        back = np.einsum("pa,qb->abpq", t.output, t.output).reshape(points, m * m)
        y = self.add("MatMul", [y, self.literal(back.astype(dtype.numpy), dtype)])
        y = self.add("Reshape", [y, self.integers([n, o, down, across, m, m])])
        y = self.add("Transpose", [y], perm=[0, 1, 2, 4, 3, 5])
        y = self.add("Reshape", [y, self.integers([n, o, down * m, across * m])])
        y = self.slice(y, [0] * 4, out, [1] * 4)
        return self.add("Cast", [y], to=onnx.TensorProto.INT32) if is_of_bytes else y

    def rounded(self, name: str, type_: ValueType, block: int) -> str:
        """Add the rounding of each block of the last axis to multiples of its largest magnitude / 127."""
        *lead, terms = type_.shape
        pads = self.integers([*[0] * type_.rank, *[0] * len(lead), -terms % block])
        blocks = self.add("Reshape", [self.add("Pad", [name, pads]), self.integers([*lead, -1, block])])
        most = self.add("ReduceMax", [self.add("Abs", [blocks]), self.integers([-1])], keepdims=1)
        least, limit, share = (
            self.literal(np.array(x).astype(type_.dtype.numpy), type_.dtype) for x in (LEAST, MOST, 1 / MOST)
        )
        inverse = self.add("Div", [limit, self.add("Max", [most, least])])
        whole = self.add("Round", [self.add("Mul", [blocks, inverse])])
        # The difference makes blocks with an infinity NaN.
        step = self.add("Add", [self.add("Mul", [most, share]), self.add("Sub", [most, most])])
        found = self.add("Reshape", [self.add("Mul", [whole, step]), self.integers([*lead, -1])])
        return self.slice(found, (0,) * type_.rank, type_.shape, (1,) * type_.rank)

    def stored(self, at: StoredAttributes, inputs: Sequence[str], types: Sequence[ValueType]) -> str:
        """Add a product by stored weights, which are unpacked, widened and scaled first."""
        (a, q, scale), zeros = inputs[:3], inputs[3:]
        blocks, columns = types[2].shape
        terms, rows = blocks * at.block, types[0].shape[-1]
        a = self.rounded(a, types[0], at.block) if at.is_rounded else a
        if at.bits < 8:
            adjacent = GROUP if at.is_rounded else 1
            shifts = self.literal(np.arange(0, 8, at.bits, dtype=np.uint8).reshape(1, -1, 1, 1), DType.U8)
            mask = self.literal(np.full((1, 1, 1, 1), (1 << at.bits) - 1, np.uint8), DType.U8)
            single = self.add("Reshape", [q, self.integers([-1, 1, adjacent, columns])])
            single = self.add("Expand", [single, self.integers([1, at.each, 1, 1])])
            single = self.add("BitwiseAnd", [self.add("BitShift", [single, shifts], direction="RIGHT"), mask])
            q = self.add("Reshape", [single, self.integers([-1, columns])])

        def repeated(name: str) -> str:
            single = self.add("Unsqueeze", [name, self.integers([1])])
            single = self.add("Expand", [single, self.integers([blocks, at.block, columns])])
            return self.add("Reshape", [single, self.integers([terms, columns])])

        def widened(name: str) -> str:
            return self.add("Cast", [name], to=onnx_type(types[0].dtype))

        given = self.literal(np.array(at.zero).astype(types[0].dtype.numpy), types[0].dtype)
        zero = widened(repeated(zeros[0])) if zeros else given
        wide = self.add("Sub", [widened(self.slice(q, (0, 0), (terms, columns), (1, 1))), zero])
        scales = repeated(scale) if types[2].dtype is types[0].dtype else widened(repeated(scale))
        scaled = self.add("Mul", [wide, scales])
        return self.add("MatMul", [a, self.slice(scaled, (0, 0), (rows, columns), (1, 1))])

    def gathered(self, inputs: Sequence[str], types: Sequence[ValueType]) -> str:
        """Add a product by matrices that an index chooses, which are gathered first."""
        count, wide = types[1].shape[0], self.add("Cast", [inputs[2]], to=onnx_type(DType.I64))
        ends = [self.literal(np.array(n, np.int64), DType.I64) for n in (-count, count - 1)]
        matrices = self.add("Gather", [inputs[1], self.add("Clip", [wide, *ends])], axis=0)
        rows = self.add("Unsqueeze", [inputs[0], self.integers([1])])
        return self.add("Squeeze", [self.add("MatMul", [rows, matrices]), self.integers([1])])

    def loop(self, at: LoopAttributes, inputs: Sequence[str]) -> str:
        """Add a loop as a Scan, whose body reads the values that all iterations need from outside."""
        self.count += 1
        end = at.states + len(at.reads_backward)
        if at.is_counted:
            first = [self.add("Slice", [x, self.integers([0]), inputs[-1]]) for x in inputs[at.states : end]]
            *inputs, count = (*inputs[: at.states], *first, *inputs[end:])
        body = OnnxNodes(body_of(at.body), self.where, f"{self.prefix}t{self.count}_")
        inside = [f"{body.prefix}i{i}" for i in range(end)]
        body.names = {v: name for (_, v), name in zip(body.body.inputs, (*inside, *inputs[end:]), strict=True)}
        outputs = [f"{body.prefix}o{i}" for i in range(len(at.outputs))]
        body.body = replace(body.body, outputs=tuple(zip(outputs, (v for _, v in body.body.outputs), strict=True)))

        def described(names: Sequence[str], side: Sequence[ValueType]) -> list[onnx.ValueInfoProto]:
            given = zip(names, side, strict=False)
            return [helper.make_tensor_value_info(name, onnx_type(t.dtype), t.shape) for name, t in given]

        sliced = list(inputs[at.states : end])
        if not sliced:  # a Scan has at least one input with slices
            sliced.append(self.literal(np.zeros(at.trips), DType.F64))
        ends = [described(names, side) for names, side in zip((inside, outputs), at.body_types(), strict=True)]
        names = [f"{self.prefix}t{self.count}_{i}" for i in range(len(outputs))]
        if not at.reads_backward:
            ends[0] += described([f"{body.prefix}unread"], [ValueType((), DType.F64)])
        node = helper.make_node(
            "Scan",
            [*inputs[: at.states], *sliced],
            names,
            body=helper.make_graph(body.nodes(), "body", *ends),
            num_scan_inputs=len(sliced),
            scan_input_directions=list(map(int, at.reads_backward)) or [0],
        )
        if at.writes_backward:
            backward = list(map(int, at.writes_backward))
            node.attribute.append(helper.make_attribute("scan_output_directions", backward))
        self.made.append(node)
        if not at.is_counted or at.output < at.states:
            return names[at.output]
        missing = self.add("Sub", [self.integers([at.trips]), count])
        rank = ValueType.parse(at.outputs[at.output]).rank
        pads = self.add("Concat", [self.integers([0] * rank), missing, self.integers([0] * (rank - 1))], axis=0)
        return self.add("Pad", [names[at.output], pads])

    def opaque(self, at: OpaqueAttributes, inputs: Sequence[str]) -> str:
        """Add the node of an opaque primitive as the model has it, or nodes of this opset with the same meaning."""
        key = (at.node, *inputs)
        if key not in self.opaque_outputs:
            self.opaque_outputs[key] = self.opaque_node(at, inputs)
        return self.opaque_outputs[key][at.output]

    def opaque_node(self, at: OpaqueAttributes, inputs: Sequence[str]) -> dict[int, str]:
        """Add a node for all outputs of an operator; return their names by position."""
        made = opaque_model(at)
        if at.domain:
            self.opsets[at.domain] = at.opset
        elif (since := _since(at.op_type, at.opset)) > OPSET:
            self.opsets[""] = max(since, self.opsets[""])
        elif since < _since(at.op_type, OPSET):
            try:
                made = onnx.version_converter.convert_version(made, OPSET)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"{at.op_type} of opset {at.opset} has no form in {OPSET}", self.where
                ) from error
        names: dict[str, str] = dict(zip((item.name for item in made.graph.input), inputs, strict=True)) | {"": ""}
        for tensor in made.graph.initializer:
            names[tensor.name] = self.add("Constant", [], value=tensor)
        for node in made.graph.node:
            self.count += 1
            names |= {name: f"{self.prefix}t{self.count}_{i}" for i, name in enumerate(node.output) if name}
            for field in (node.input, node.output):
                renamed = [names[name] for name in field]
                del field[:]
                field.extend(renamed)
            self.made.append(node)
        positions = (i for i, text in enumerate(at.outputs) if text)
        return {i: names[item.name] for i, item in zip(positions, made.graph.output, strict=True)}


def _since(op: str, opset: int) -> int:
    """Return the first opset with an operator's definition of this one."""
    return int(onnx.defs.get_schema(op, opset).since_version)


def onnx_tensor(name: str, array: Array, dtype: DType) -> onnx.TensorProto:
    """Return an array as a TensorProto."""
    dense = np.ascontiguousarray(array, dtype.numpy)
    if dense.dtype == ml_dtypes.bfloat16:
        dense = dense.view(np.uint16)
    made: onnx.TensorProto = helper.make_tensor(name, onnx_type(dtype), np.shape(array), dense.tobytes(), raw=True)
    return made
