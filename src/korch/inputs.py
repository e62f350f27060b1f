"""Inputs of a model: random ones, the same for each engine and each run, and those in a file .npz.

Random floats have a standard normal distribution. Booleans and integers are 0 or 1, which are valid token
IDs and indices in any model.
"""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from korch.errors import ModelError, OptionError

Arrays = dict[str, NDArray[Any]]
Tensors = Mapping[str, tuple[Sequence[int], np.dtype[Any]]]
"""By input: the shape and the element type."""


def random_arrays(tensors: Tensors, seed: int = 0) -> Arrays:
    """Make an array for each named shape and element type, in their order.

    Raises:
        OptionError: the seed is negative.
    """
    if seed < 0:
        raise OptionError(f"the value {seed} is out of range", "option --seed", "at least 0")
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, (shape, dtype) in tensors.items():
        if np.dtype(dtype).kind in "iub":
            arrays[name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            arrays[name] = rng.standard_normal(shape).astype(dtype)
    return arrays


def random_inputs(model_path: Path, seed: int = 0, shapes: Mapping[str, Sequence[int]] | None = None) -> Arrays:
    """Make an array for each input of the model, in the model's order.

    `shapes`: the shapes of inputs with unknown dimensions; they override known shapes too.

    Raises:
        ModelError: the file can't be read as ONNX.
        OptionError: a dimension is unknown and `shapes` doesn't give it.
    """
    import onnx

    graph = read_graph(model_path)
    initializers = {tensor.name for tensor in graph.initializer}
    found: dict[str, tuple[Sequence[int], np.dtype[Any]]] = {}
    for declared in graph.input:
        name, tensor_type = declared.name, declared.type.tensor_type
        if name in initializers:
            continue
        declared_shape = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor_type.shape.dim]
        shape = list((shapes or {}).get(name, declared_shape))
        if min(shape, default=0) < 0:
            raise OptionError(
                f"the input {name!r} has an unknown dimension",
                where=str(model_path),
                hint=f"Give its shape, as in --shape {name}=1x3x224x224",
            )
        found[name] = (shape, onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
    return random_arrays(found, seed)


def read_graph(model_path: Path) -> Any:
    """Return the graph of an ONNX file, without external data.

    Raises:
        ModelError: the file can't be read as ONNX.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        return onnx.load(str(model_path), load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise ModelError(f"can't be read as ONNX ({error})", where=str(model_path)) from error


def free_dimensions(graph: Any, inputs: Arrays) -> dict[str, int]:
    """Return the size in `inputs` of each symbolic dimension of a graph's inputs, by its name."""
    sizes: dict[str, int] = {}
    for declared in graph.input:
        if declared.name not in inputs:
            continue
        dimensions = declared.type.tensor_type.shape.dim
        for dimension, size in zip(dimensions, inputs[declared.name].shape, strict=False):
            if dimension.dim_param:
                sizes[dimension.dim_param] = size
    return sizes


def given_arrays(given: Path | Mapping[str, Any], tensors: Tensors) -> Arrays:
    """Return the arrays of the option `inputs`, converted to the model's element types.

    `given`: a file .npz, or arrays by name.

    Raises:
        OptionError: they can't be read, or names, shapes or element types are not the model's.
    """
    where = where_of(given)
    arrays = named_arrays(given, tensors, where)
    for name, (shape, dtype) in tensors.items():
        if arrays[name].shape != tuple(shape):
            raise OptionError(f"array {name!r} has shape {list(arrays[name].shape)}", where, str(list(shape)))
        arrays[name] = converted(name, arrays[name], dtype, where)
    return {name: arrays[name] for name in tensors}


def where_of(given: object) -> str:
    """Return the name of the option `inputs` for messages, with the file if it is one."""
    return f"option inputs, {given}" if isinstance(given, Path) else "option inputs"


def named_arrays(given: Path | Mapping[str, Any], names: Iterable[str], where: str) -> Arrays:
    """Return arrays that a user gives for the named inputs.

    Raises:
        OptionError: they can't be read, an array is missing, or there is one more.
    """
    arrays = _read(given, where) if isinstance(given, Path) else {k: np.asarray(v) for k, v in given.items()}
    expected = f"arrays {', '.join(names) or 'for no input'}"
    if missing := [name for name in names if name not in arrays]:
        raise OptionError(f"there is no array {missing[0]!r}", where, expected)
    if other := [name for name in arrays if name not in set(names)]:
        raise OptionError(f"the model has no input {other[0]!r}", where, expected)
    return arrays


def converted(name: str, array: NDArray[Any], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """Return an array with another element type of the same kind; integers may become floats.

    Raises:
        OptionError: the element type is of another kind, or a number does not fit into the wanted type.
    """
    kinds = ("f", "iu", "b")
    wanted = next((kind for kind in kinds if dtype.kind in kind), "f")
    if array.dtype.kind not in wanted + ("iu" if wanted == "f" else "") and array.dtype != dtype:
        raise OptionError(f"array {name!r} is of type {array.dtype}", where, str(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        found = array.astype(dtype)
    if wanted == "iu" and not np.array_equal(found, array):
        raise OptionError(f"array {name!r} has numbers that {dtype} can't hold", where, str(dtype))
    return found


def _read(path: Path, where: str) -> Arrays:
    """Return the arrays of a file .npz; np.load also reads files of one array, and of pickled objects."""
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OptionError(
            f"the file can't be read: {reason}", where, "a file .npz, as numpy.savez writes it"
        ) from error
