"""Infers the types of a node's outputs from those of its inputs, by ONNX's inference functions.

Nodes are inferred one at a time, and inference may read the elements of small constant inputs. A
shape that a subgraph computes has been folded into a constant by the time that it is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import onnx
import onnx.version_converter

from korch.errors import ModelError, UnsupportedError, excerpt
from korch.frontend.classical import types_of
from korch.frontend.indices import check_elements
from korch.frontend.names import captured_names, node_label
from korch.frontend.shapes import check_size, dtype_of, type_name
from korch.frontend.windows import correct_windows
from korch.primitive.op import Array
from korch.primitive.ops.opaque import onnx_type
from korch.primitive.types import DType, ValueType

REFUSALS = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
    RuntimeError,
    ValueError,
)
"""The exceptions that ONNX's functions raise for models that they can't process."""

F32, BF16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16

MOST_ELEMENTS = 4096  # the largest constant that inference may read

RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
OLDEST_OPSET = 7
# Operators for which ONNX has no inference function; their first output is like their first input.
LIKE_FIRST_INPUT = frozenset({"GroupNormalization", "MeanVarianceNormalization"})


def check_opsets(opsets: Mapping[str, int], model: str) -> None:
    """Refuse a model whose opset is newer than the installed `onnx` package supports.

    Raises:
        UnsupportedError: the opset is too new.
    """
    newest, version = onnx.defs.onnx_opset_version(), opsets.get("", 0)
    if version > newest:
        raise UnsupportedError(
            f"it uses opset {version}",
            where=model,
            expected=f"at most {newest}",
            hint="Install a newer `onnx`, or export with an older opset",
        )


def modernized(proto: onnx.ModelProto, model: str) -> onnx.ModelProto:
    """Return a model of an older opset converted to `OLDEST_OPSET`; any other model unchanged.

    Raises:
        UnsupportedError: ONNX's converter can't convert it.
    """
    version = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    if not 0 < version < OLDEST_OPSET:
        return proto
    try:
        return onnx.version_converter.convert_version(proto, OLDEST_OPSET)
    except REFUSALS as error:
        raise UnsupportedError(
            f"it uses opset {version}, and ONNX can't convert it: " + excerpt(error),
            where=model,
            expected=f"at least {OLDEST_OPSET}",
            hint="Export the model again with a newer opset",
        ) from error


def find_schema(node: onnx.NodeProto, opsets: Mapping[str, int], model: str) -> onnx.defs.OpSchema:
    """Return the definition of a node's operator.

    Raises:
        ModelError: the model does not import the domain, or the node breaks the definition.
        UnsupportedError: the operator or its domain is unknown, or its output is random.
    """
    where = f"{model}: {node_label(node)}"
    domain = node.domain
    if domain not in opsets:
        raise ModelError(f"the model does not import its domain {domain or 'ai.onnx'!r}", where=where)
    if domain not in _known_domains():
        raise UnsupportedError(
            f"the domain {domain!r} is unknown",
            where=where,
            expected="operators of the ONNX standard",
            hint="Export the model before an engine's own optimizer has rewritten it",
        )
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets[domain], domain)
    except (onnx.defs.SchemaError, UnicodeDecodeError) as error:
        raise UnsupportedError(
            f"opset {opsets[domain]} has no operator {node.op_type!r}",
            where=where,
            hint="Check the name, or the opset that the model imports",
        ) from error
    if node.op_type in RANDOM and not domain:
        raise UnsupportedError(
            "its output is random, so no plan could be checked",
            where=where,
            hint="Make the random tensor an input of the model",
        )
    _check_node(node, opsets, where)
    return schema


@cache
def _known_domains() -> frozenset[str]:
    return frozenset(schema.domain for schema in onnx.defs.get_all_schemas())


def _check_node(node: onnx.NodeProto, opsets: Mapping[str, int], where: str) -> None:
    context = type(onnx.checker.DEFAULT_CONTEXT)()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = dict(opsets)
    if any(True for _ in captured_names(node)):
        return  # the checker would reject names that a subgraph reads from outside
    try:
        onnx.checker.check_node(node, context)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split("==> Context")[0].split())
        if "is deprecated" not in text:
            raise ModelError(f"it breaks the operator's definition: {text}", where=where) from error


def type_proto(type_: ValueType) -> onnx.TypeProto:
    """Return a type as a TypeProto."""
    return onnx.helper.make_tensor_type_proto(onnx_type(type_.dtype), type_.shape)


def array_type_proto(array: Array) -> onnx.TypeProto:
    """Return an array's type as a TypeProto."""
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_type_proto(dtype, array.shape)


@dataclass(frozen=True)
class Known:
    """What is known when a node is inferred."""

    opsets: Mapping[str, int]  # the version of each domain
    types: Mapping[str, ValueType]  # the types of values
    constants: Mapping[str, Array]  # the values whose elements are known
    model: str  # the model's name
    others: Mapping[str, onnx.TypeProto] = field(default_factory=dict)  # types of values that are not static tensors


def infer_types(node: onnx.NodeProto, schema: onnx.defs.OpSchema, known: Known) -> dict[str, onnx.TypeProto]:
    """Return the types of a node's outputs as TypeProtos; dimensions may be unknown.

    Raises:
        ModelError: the input types contradict the operator's definition.
    """
    types, constants, others, model = known.types, known.constants, known.others, known.model
    _check_axis(node, types, constants, f"{model}: {node_label(node)}")
    check_elements(node, types, constants, f"{model}: {node_label(node)}")
    given = {name for name in node.input if name}
    inputs = {
        name: others[name]
        if name in others
        else type_proto(types[name])
        if name in types
        else array_type_proto(constants[name])
        for name in given
    }
    data = {
        name: onnx.numpy_helper.from_array(constants[name], name)
        for name in given
        if name in constants and constants[name].size <= MOST_ELEMENTS
    }
    if node.op_type in LIKE_FIRST_INPUT and not node.domain:
        # ONNX infers nothing, or refuses an operator that a later opset redefines.
        return {node.output[0]: inputs[node.input[0]]}
    if node.op_type == "STFT" and not any(attribute.name == "onesided" for attribute in node.attribute):
        # ONNX infers the shape for 0, although the attribute's default is 1.
        whole = onnx.NodeProto()
        whole.CopyFrom(node)
        whole.attribute.append(onnx.helper.make_attribute("onesided", 1))
        node = whole
    if (first := next(iter(node.input), "")) in types and (classical := types_of(node, types[first])):
        return classical
    imports = [onnx.helper.make_opsetid(*item) for item in known.opsets.items()]
    try:
        found: dict[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(
            schema, node, inputs, data, None, imports
        )
    except REFUSALS as error:
        text = " ".join(str(error).split())
        floats = {proto.tensor_type.elem_type for proto in inputs.values()} & {BF16, F32}
        if "unsupported type: tensor(bfloat16)" in text and floats == {BF16}:
            return _types_of_bfloat16(node, schema, known)
        raise ModelError(
            f"the types of its inputs do not fit ({text})",
            where=f"{model}: {node_label(node)}",
            expected=", ".join(f"{n!r}: {types.get(n, 'constant')}" for n in node.input if n) + " to be legal",
        ) from error
    correct_windows(node, inputs, found, f"{model}: {node_label(node)}")
    return found


def _types_of_bfloat16(node: onnx.NodeProto, schema: onnx.defs.OpSchema, known: Known) -> dict[str, onnx.TypeProto]:
    """Infer the types of outputs with float32 in place of bfloat16, and convert them back.

    Exporters write bfloat16 in opsets whose definitions do not allow it, for example for Conv before opset 22.
    """
    types = {n: replace(t, dtype=DType.F32) if t.dtype is DType.BF16 else t for n, t in known.types.items()}
    given = {name: known.constants[name] for name in node.input if name in known.constants}
    wide = {n: a.astype(np.float32) if a.dtype == DType.BF16.numpy else a for n, a in given.items()}
    found = infer_types(node, schema, replace(known, types=types, constants=wide))
    for proto in found.values():
        if proto.tensor_type.elem_type == F32:
            proto.tensor_type.elem_type = BF16
    return found


def _check_axis(
    node: onnx.NodeProto, types: Mapping[str, ValueType], constants: Mapping[str, Array], where: str
) -> None:
    """Refuse an axis that is out of range for the first input: ONNX indexes memory with it unchecked."""
    first = node.input[0] if node.input else ""
    rank = constants[first].ndim if first in constants else getattr(types.get(first), "rank", None)
    if rank is None or node.op_type in ("QuantizeLinear", "DequantizeLinear"):  # they may ignore it
        return
    more = 0 if node.op_type in ("LayerNormalization", "RMSNormalization") else 1  # OneHot, for example, adds an axis
    for attribute in node.attribute:
        if attribute.name == "axis" and not -rank - more <= attribute.i <= rank + more:
            raise ModelError(
                f"its axis is {attribute.i}, of an input with {rank} axes",
                where=where,
                expected=f"{-rank} to {rank - 1}",
            )


def static_type(proto: onnx.TypeProto, name: str, node: onnx.NodeProto, model: str) -> ValueType:
    """Return an inferred type as a `ValueType`, which is static.

    Raises:
        ModelError: a size is negative, or it is impossibly large.
        UnsupportedError: it is not a tensor, Korch does not support its element type, or its shape
            depends on data.
    """
    where = f"{model}: {node_label(node)}"
    kind = proto.WhichOneof("value") if proto is not None else None
    if kind not in ("tensor_type", None):
        raise UnsupportedError(
            f"its output {name!r} is a {kind.removesuffix('_type')}, not a tensor",
            where=where,
            hint="Korch runs models of tensors only",
        )
    tensor = proto.tensor_type if kind else None
    if tensor is not None and tensor.elem_type and dtype_of(tensor.elem_type) is None:
        raise UnsupportedError(
            f"its output {name!r} has elements of type {type_name(tensor.elem_type)}",
            where=where,
            expected="float64, float32, float16, bfloat16, integers of 8 to 64 bits, or bool",
        )
    dtype = dtype_of(tensor.elem_type) if tensor is not None else None
    if tensor is not None and any(dim.dim_value < 0 for dim in tensor.shape.dim):
        sizes = [dim.dim_value for dim in tensor.shape.dim]
        raise ModelError(f"its output {name!r} has the shape {sizes}: a size is negative", where)
    known = (
        tensor is not None
        and tensor.HasField("shape")
        and all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in tensor.shape.dim)
    )
    if tensor is None or dtype is None or not known:
        raise UnsupportedError(
            f"the shape of its output {name!r} depends on data, or ONNX can't infer it",
            where=where,
            expected="shapes that are known before the model runs",
            hint="Cut the model before this node, or replace the node by one of static shape",
        )
    type_ = ValueType(tuple(dim.dim_value for dim in tensor.shape.dim), dtype)
    if node.op_type not in ("Gather", "GatherND"):  # a gathered operand of a product is not materialized
        check_size(type_, f"{where}: output {name!r}")
    return type_
