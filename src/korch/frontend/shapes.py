"""Combines declared input shapes with those that the user gives into static shapes."""

import logging
from collections.abc import Mapping, Sequence

import onnx

from korch.errors import ModelError, OptionError, UnknownSizeError, UnsupportedError
from korch.primitive.types import DType, ValueType

logger = logging.getLogger("korch.frontend")

LARGEST_BYTES = 1 << 34
"""The most bytes of a value; a model with a larger one is damaged, or meant for a cluster."""


def bind_inputs(
    declared: Sequence[onnx.ValueInfoProto], shapes: Mapping[str, Sequence[int]], model: str
) -> dict[str, ValueType]:
    """Return the static type of each input.

    A named dimension has the same size everywhere: once one input fixes it, it is known for the
    others.

    `shapes`: shapes by input name; also sizes, as shapes of one number, by dimension name.

    Raises:
        UnknownSizeError: a dimension is unknown.
        OptionError: a given shape names no input, or contradicts what the model declares.
        UnsupportedError: an input is not a tensor of a supported element type.
    """
    names = [item.name for item in declared]
    sizes = _symbols(declared, {n: s for n, s in shapes.items() if n not in names}, model)
    for item in declared:
        if item.name in shapes:
            _bind(item, shapes[item.name], sizes, model)
    free = [name for name in _names(declared) if name not in sizes]
    return {item.name: _static(item, shapes.get(item.name), sizes, free, model) for item in declared}


def _names(declared: Sequence[onnx.ValueInfoProto]) -> list[str]:
    dims = (dim for item in declared for dim in item.type.tensor_type.shape.dim)
    return list(dict.fromkeys(dim.dim_param for dim in dims if dim.dim_param))


def _symbols(declared: Sequence[onnx.ValueInfoProto], given: Mapping[str, Sequence[int]], model: str) -> dict[str, int]:
    """Return the sizes that are given by dimension name."""
    known = _names(declared)
    sizes = {}
    for name, size in given.items():
        where = f"{model}: option --shape"
        if name not in known:
            inputs = ", ".join(repr(item.name) for item in declared)
            symbols = f", or a dimension: {', '.join(map(repr, known))}" if known else ""
            raise OptionError(
                f"the model has no input and no named dimension {name!r}",
                where=where,
                expected=f"one of {inputs}{symbols}",
            )
        if len(size) != 1 or size[0] < 0:
            raise OptionError(
                f"the dimension {name!r} can't be {'x'.join(map(str, size)) or 'nothing'}",
                where=where,
                expected="one size, not negative",
            )
        sizes[name] = int(size[0])
    return sizes


def _bind(item: onnx.ValueInfoProto, given: Sequence[int], sizes: dict[str, int], model: str) -> None:
    where = f"{model}: option --shape {item.name}={'x'.join(map(str, given))}"
    if any(n < 0 for n in given):
        raise OptionError("a size is negative", where=where)
    if not item.type.tensor_type.HasField("shape"):
        return
    dims = item.type.tensor_type.shape.dim
    if len(dims) != len(given):
        raise OptionError(f"it has {len(given)} dimensions", where=where, expected=f"{len(dims)}, as in the model")
    for axis, (dim, size) in enumerate(zip(dims, given, strict=True)):
        if dim.HasField("dim_value") and dim.dim_value not in (size, 0, -1):
            raise OptionError(
                f"dimension {axis} is {size}",
                where=where,
                expected=f"{dim.dim_value}, which the model fixes",
                hint="Export the model with this dimension dynamic to change it",
            )
        if dim.dim_param and sizes.setdefault(dim.dim_param, size) != size:
            raise OptionError(
                f"dimension {axis}, {dim.dim_param!r}, is {size}",
                where=where,
                expected=f"{sizes[dim.dim_param]}, which another input gives it",
            )


def _static(
    item: onnx.ValueInfoProto, given: Sequence[int] | None, sizes: Mapping[str, int], free: Sequence[str], model: str
) -> ValueType:
    where = f"{model}: input {item.name!r}"
    if item.type.WhichOneof("value") != "tensor_type":
        kind = item.type.WhichOneof("value") or "nothing"
        raise UnsupportedError(f"it is of kind {kind}, not a tensor", where=where)
    tensor = item.type.tensor_type
    dtype = dtype_of(tensor.elem_type)
    if dtype is None:
        raise UnsupportedError(f"elements of type {type_name(tensor.elem_type)} can't be computed with", where=where)
    if given is not None:
        return _sized(ValueType(tuple(int(n) for n in given), dtype), where)
    if not tensor.HasField("shape"):
        raise _unknown(item.name, "the shape", "1x3x224x224", where)
    shape = []
    for axis, dim in enumerate(tensor.shape.dim):
        known = dim.dim_value if dim.HasField("dim_value") else sizes.get(dim.dim_param, -1)
        if known < -1:
            raise ModelError(f"dimension {axis} is {known}: a size is negative", where=where)
        if known < 0:
            example = "x".join(
                str(d.dim_value) if d.HasField("dim_value") and d.dim_value >= 0 else (d.dim_param or "N")
                for d in tensor.shape.dim
            )
            named = f", {dim.dim_param!r}," if dim.dim_param else ""
            symbols = free if dim.dim_param else ()
            raise _unknown(item.name, f"dimension {axis}{named}", example, where, symbols)
        shape.append(known)
    return _sized(ValueType(tuple(shape), dtype), where)


def _sized(type_: ValueType, where: str) -> ValueType:
    check_size(type_, where)
    return type_


def check_size(type_: ValueType, where: str) -> None:
    """Raise `ModelError` if a value is larger than `LARGEST_BYTES`."""
    if type_.size_bytes > LARGEST_BYTES:
        raise ModelError(
            f"it is {type_}, {type_.size_bytes >> 30} GiB",
            where=where,
            expected=f"at most {LARGEST_BYTES >> 30} GiB",
            hint="Check the sizes in the model",
        )


def _unknown(name: str, what: str, example: str, where: str, symbols: Sequence[str] = ()) -> UnknownSizeError:
    sizes = " ".join(f"--shape {symbol}={1 if is_batch(symbol) else 128}" for symbol in symbols)
    other = f", or all by their names: {sizes}" if symbols else ""
    return UnknownSizeError(
        f"{what} is unknown",
        where=where,
        expected="a static shape",
        hint=f"Give it with --shape {name}={example}, a number for each dimension{other}. "
        f"In Python: shapes={{{name!r}: (...)}}",
    )


def check_declared_outputs(declared: Sequence[onnx.ValueInfoProto], types: Mapping[str, ValueType], model: str) -> None:
    """Compare the types that a model declares for its outputs with the inferred types.

    A different shape causes only a warning, as in ONNX Runtime: the nodes decide what is computed.

    `declared`: the outputs as ValueInfoProtos; dimensions that they leave open are not compared. `types`: the inferred
    types, by name; outputs without a static type are missing.

    Raises:
        ModelError: an output is declared with another element type.
    """
    for item in declared:
        tensor, found = item.type.tensor_type, types.get(item.name)
        if found is None or not tensor.elem_type:
            continue
        if dtype_of(tensor.elem_type) is not found.dtype:
            raise ModelError(
                f"it is declared with elements of type {type_name(tensor.elem_type)}, and its node computes {found}",
                where=f"{model}: output {item.name!r}",
                hint="Declare the type that is computed, or export the model again",
            )
        if not tensor.HasField("shape"):
            continue
        sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        if len(sizes) != found.rank or any(size not in (-1, n) for size, n in zip(sizes, found.shape, strict=True)):
            text = ",".join("?" if size < 0 else str(size) for size in sizes)
            logger.warning(
                "%s: output %r is declared with shape [%s], but its node computes %s; the declared shape is ignored",
                model,
                item.name,
                text,
                found,
            )


def is_batch(symbol: str) -> bool:
    """Return whether a dimension's name says that it is a batch."""
    return "batch" in symbol.lower() or symbol.lower() in ("n", "b", "bs", "bsz")


def is_number_tensor(item: onnx.ValueInfoProto) -> bool:
    """Return whether an input is a tensor of a supported element type."""
    is_tensor = item.type.WhichOneof("value") == "tensor_type"
    return is_tensor and dtype_of(item.type.tensor_type.elem_type) is not None


def dtype_of(elem_type: int) -> DType | None:
    """Return the element type with this number in ONNX, or None if Korch does not support it."""
    try:
        return DType.of(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
    except (KeyError, TypeError, ValueError):
        return None


def type_name(elem_type: int) -> str:
    """Return ONNX's name for an element type."""
    try:
        return str(onnx.TensorProto.DataType.Name(elem_type))
    except ValueError:
        return str(elem_type)
