"""Operators of the domain ai.onnx.ml: defined by nodes of the ONNX standard, or their types, which ONNX can't infer.

Exporters of scikit-learn, XGBoost and LightGBM write them. Operators on texts and maps are left to the host. Ensembles
of trees and support vectors are kept whole: which node of a tree is next depends on data, and a library visits no
others.
"""

from collections.abc import Callable, Mapping

import numpy as np
import onnx

from korch.frontend.definition import Definition
from korch.primitive.op import Array
from korch.primitive.ops.opaque import onnx_type
from korch.primitive.types import DType, ValueType

DOMAIN = "ai.onnx.ml"

OLDEST_OPSET = 13
"""The first opset in which the nodes of all definitions are as they are written here."""

MOST_CHOICES = 64
"""The longest table that is read by comparisons with all positions."""

FLOAT = onnx.TensorProto.FLOAT


def _labels(d: Definition) -> Array | None:
    """Return the labels of a classifier, None if they are texts."""
    labels = d.attributes.get("classlabels_ints") or d.attributes.get("classlabels_int64s")
    return np.array(labels, np.int64) if labels else None


def _floats(d: Definition, name: str) -> Array:
    return np.array(d.attributes.numbers(name, ()), np.float32)


def _as_float(d: Definition) -> str:
    return d.op("Cast", d.needed(0, "the data"), to=FLOAT)


def _affine(d: Definition, x: str, outputs: int) -> str | None:
    """Return rows times coefficients plus intercepts; None if their numbers do not fit."""
    weights, bias = _floats(d, "coefficients"), _floats(d, "intercepts")
    shape = d.shape(d.node.input[0])
    if len(shape) != 2 or weights.size != outputs * shape[1] or bias.size not in (0, outputs):
        return None
    product = d.op("MatMul", x, d.constant(np.ascontiguousarray(weights.reshape(outputs, -1).T)))
    return d.op("Add", product, d.constant(bias)) if bias.size else product


def _chosen(d: Definition, table: Array, place: str, output: str = "") -> str:
    """Return elements of a short table, each as a sum in which all others are 0."""
    if table.dtype == np.int64 and np.array_equal(table, np.arange(len(table))):
        return d.op("Identity", place, output=output)
    axis = d.constant(np.array([-1]))
    is_place = d.op("Equal", d.op("Unsqueeze", place, axis), d.constant(np.arange(len(table))))
    parts = d.op("Where", is_place, d.constant(table), d.constant(np.zeros((), table.dtype)))
    return d.op("ReduceSum", parts, axis, keepdims=0, output=output)


_POST: Mapping[str, Callable[[Definition, str], str]] = {
    "NONE": lambda d, x: x,
    "LOGISTIC": lambda d, x: d.op("Sigmoid", x),
    "SOFTMAX": lambda d, x: d.op("Softmax", x, axis=1),
}


def _regressor(d: Definition) -> bool:
    post = _POST.get(d.attributes.text("post_transform", "NONE"))
    y = _affine(d, _as_float(d), d.attributes.integer("targets", 1))
    if post is None or y is None:
        return False
    d.end(post(d, y))
    return True


def _classifier(d: Definition) -> bool:
    """The label of the largest score, the first of equal ones; one score for two labels has rules of its own."""
    labels, post = _labels(d), _POST.get(d.attributes.text("post_transform", "NONE"))
    if labels is None or post is None or len(labels) < 2:
        return False
    scores = _affine(d, _as_float(d), len(labels))
    if scores is None:
        return False
    label, outputs = d.op("ArgMax", scores, axis=1, keepdims=0), list(d.node.output)
    if outputs[0]:
        _chosen(d, labels, label, outputs[0])
    if len(outputs) > 1 and outputs[1]:
        d.op("Identity", post(d, scores), output=outputs[1])
    return True


def _normalizer(d: Definition) -> bool:
    """Rows divided by their norms; a row of zeros stays one."""
    x, norm = _as_float(d), d.attributes.text("norm", "MAX")
    axes = d.constant(np.array([1]))
    if len(d.shape(d.node.input[0])) != 2 or norm not in ("L1", "L2"):
        return False
    size = d.op("ReduceSum", d.op("Abs" if norm == "L1" else "Mul", *[x] * (1 if norm == "L1" else 2)), axes)
    size = d.op("Sqrt", size) if norm == "L2" else size
    is_zero = d.op("Equal", size, d.number(0))
    d.end(d.op("Div", x, d.op("Where", is_zero, d.number(1), size)))
    return True


def _scaler(d: Definition) -> bool:
    moved = d.op("Sub", _as_float(d), d.constant(_floats(d, "offset")))
    d.end(d.op("Mul", moved, d.constant(_floats(d, "scale"))))
    return True


def _binarizer(d: Definition) -> bool:
    x = d.needed(0, "the data")
    dtype = d.dtype(x)
    limit = d.number(d.attributes.number("threshold", 0.0))
    if dtype != np.float32:
        return False
    d.end(d.op("Cast", d.op("Greater", x, limit), to=FLOAT))
    return True


def _imputer(d: Definition) -> bool:
    x, values = d.needed(0, "the data"), _floats(d, "imputed_value_floats")
    replaced = np.array(d.attributes.number("replaced_value_float", 0.0), np.float32)
    if d.dtype(x) != np.float32 or not values.size:
        return False
    is_missing = d.op("IsNaN", x) if np.isnan(replaced) else d.op("Equal", x, d.constant(replaced))
    d.end(d.op("Where", is_missing, d.constant(values), x))
    return True


def _extractor(d: Definition) -> bool:
    """Columns at given positions, as an axis even if the data has one axis only."""
    x, shape = d.needed(0, "the data"), d.shape(d.node.input[0])
    at = d.op("Reshape", d.needed(1, "the positions"), d.constant(np.array([-1])))
    table = d.constants.get(x)
    is_short = table is not None and table.ndim == 1 and len(table) <= MOST_CHOICES
    found = _chosen(d, table, at) if table is not None and is_short else d.op("Gather", x, at, axis=-1)
    d.end(d.op("Reshape", found, d.constant(np.array([1, -1]))) if len(shape) == 1 else found)
    return True


def _features(d: Definition) -> bool:
    """Columns of all inputs, each cut or filled with zeros to its number of columns."""
    names, counts = [name for name in d.node.input if name], d.attributes.integers("inputdimensions", ())
    if len(counts) != len(names) or any(len(d.shape(name)) != 2 for name in names):
        return False
    parts = []
    for name, count in zip(names, counts, strict=True):
        parts.append(d.op("Cast", name, to=FLOAT))
        if count != d.shape(name)[1]:
            parts[-1] = d.op("Pad", parts[-1], d.constant(np.array([0, 0, 0, count - d.shape(name)[1]])))
    d.end(d.op("Concat", *parts, axis=1))
    return True


def _one_hot(d: Definition) -> bool:
    x, known = d.needed(0, "the data"), d.attributes.integers("cats_int64s", ())
    if not known or not d.attributes.integer("zeros", 1):
        return False
    x = d.op("Unsqueeze", d.op("Cast", x, to=onnx.TensorProto.INT64), d.constant(np.array([-1])))
    d.end(d.op("Cast", d.op("Equal", x, d.constant(np.array(known, np.int64))), to=FLOAT))
    return True


def _encoder(d: Definition) -> bool:
    """The value of the first equal key, else the default."""
    x, at = d.needed(0, "the data"), d.attributes
    dtype = d.dtype(x)
    keys = np.array(at.numbers("keys_floats", ()) or at.integers("keys_int64s", ()), dtype)
    if (
        not 0 < keys.size <= MOST_CHOICES
        or dtype != (np.float32 if "keys_floats" in at else np.int64)
        or (keys != keys).any()
    ):
        return False
    if "values_int64s" in at:
        table = np.array([*at.integers("values_int64s"), at.integer("default_int64", -1)], np.int64)
    elif "values_floats" in at:
        table = np.array([*at.numbers("values_floats"), at.number("default_float", -0.0)], np.float32)
    else:
        return False
    is_key = d.op("Equal", d.op("Unsqueeze", x, d.constant(np.array([-1]))), d.constant(keys))
    otherwise = d.constant(np.full((*d.shape(x), 1), 0.5, np.float32))
    scores = d.op("Concat", d.op("Cast", is_key, to=FLOAT), otherwise, axis=-1)
    _chosen(d, table, d.op("ArgMax", scores, axis=-1, keepdims=0), d.node.output[0])
    return True


DEFINITIONS: Mapping[str, Callable[[Definition], bool]] = {
    "ArrayFeatureExtractor": _extractor,
    "Binarizer": _binarizer,
    "FeatureVectorizer": _features,
    "Imputer": _imputer,
    "LabelEncoder": _encoder,
    "LinearClassifier": _classifier,
    "LinearRegressor": _regressor,
    "Normalizer": _normalizer,
    "OneHotEncoder": _one_hot,
    "Scaler": _scaler,
}
"""Functions that add nodes to a definition; they return whether the node is defined, otherwise it is kept whole."""


TYPED = ("SVMClassifier", "SVMRegressor", "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")
"""Operators that are kept whole, whose types `types_of` gives."""


def define_classical(d: Definition) -> bool:
    """Define a node of the domain ai.onnx.ml; return whether there is a definition here."""
    define = DEFINITIONS.get(d.node.op_type) if d.node.domain == DOMAIN else None
    is_known = all(n in d.types or (n in d.constants and d.constants[n].dtype.kind in "iuf") for n in d.node.input)
    return define is not None and is_known and d.opset >= OLDEST_OPSET and define(d)


def types_of(node: onnx.NodeProto, type_: ValueType) -> dict[str, onnx.TypeProto]:
    """Return the types of the outputs of a node of `TYPED` for rows of numbers; none for any other node.

    `type_`: that of the first input.
    """
    if node.domain != DOMAIN or node.op_type not in TYPED or type_.rank != 2:
        return {}
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    labels = attributes.get("classlabels_int64s") or attributes.get("classlabels_ints")
    rows, columns = type_.shape[0], attributes.get("n_targets", 1)
    if not node.op_type.endswith("Classifier"):
        # Only the operator of version 5 returns numbers of the type that it reads.
        found = [ValueType((rows, columns), type_.dtype if node.op_type == "TreeEnsemble" else DType.F32)]
    elif labels:
        columns = len(labels)
        if node.op_type == "SVMClassifier" and not attributes.get("prob_a") and attributes.get("support_vectors"):
            columns = columns * (columns - 1) // 2 if columns > 2 else 2
        found = [ValueType((rows,), DType.I64), ValueType((rows, columns), DType.F32)]
    else:
        return {}
    named = zip(node.output, found, strict=False)
    return {name: onnx.helper.make_tensor_type_proto(onnx_type(t.dtype), t.shape) for name, t in named if name}
