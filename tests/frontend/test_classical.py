"""Operators of the domain ai.onnx.ml: defined by standard operators or typed, compared with ONNX Runtime."""

from typing import Any

import numpy as np
import onnx
import pytest

from korch.fission import fission_with_report
from korch.frontend import load_model
from korch.primitive.lowering import lower_products
from korch.primitive.op import Array
from korch.primitive.reference import run
from tests.support.models import in_onnxruntime, one_operator

RNG = np.random.default_rng(5)
X = RNG.standard_normal((7, 3)).astype(np.float32)
HOLES = np.where(RNG.random((7, 3)) < 0.3, np.float32("nan"), X)
ROUND = RNG.integers(-1, 3, (7, 2))
LINEAR = {"coefficients": [*map(float, RNG.standard_normal(9))], "intercepts": [0.1, -0.2, 0.3]}
LABELS = {"classlabels_ints": [4, 9, 2]}
ONE_TREE = {
    "nodes_featureids": [0, 0, 0],
    "nodes_values": [0.1, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
}
LEAVES = {"treeids": [0, 0], "nodeids": [1, 2], "ids": [0, 1], "weights": [0.5, 2.0]}
VECTORS = {"kernel_type": "LINEAR", "kernel_params": [0.5, 0.0, 3.0], "coefficients": [0.3, -0.4, 0.1]}
SUPPORT = {"support_vectors": [*map(float, X[:3].reshape(-1))], "rho": [0.1]}

DEFINED = [
    *(("LinearRegressor", [X], {**LINEAR, "targets": 3, "post_transform": p}) for p in ("NONE", "LOGISTIC", "SOFTMAX")),
    *(("LinearClassifier", [X], {**LINEAR, **LABELS, "post_transform": p}) for p in ("NONE", "LOGISTIC", "SOFTMAX")),
    *(("Normalizer", [np.append(X, 0 * X[:1], 0)], {"norm": norm}) for norm in ("L1", "L2")),
    ("Scaler", [X], {"offset": [0.5, -1.0, 0.25], "scale": [2.0, 0.5, 1.0]}),
    ("Scaler", [X], {"offset": [0.5], "scale": [2.0]}),
    ("Scaler", [ROUND], {"offset": [0.5, 2.0], "scale": [2.0, 3.0]}),
    ("Binarizer", [X], {"threshold": 0.25}),
    ("Imputer", [HOLES], {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": float("nan")}),
    ("Imputer", [np.round(X)], {"imputed_value_floats": [7.0], "replaced_value_float": 0.0}),
    ("FeatureVectorizer", [ROUND, ROUND], {"inputdimensions": [2, 2]}),
    ("FeatureVectorizer", [X, ROUND.astype(np.float32)], {"inputdimensions": [1, 4]}),
    ("OneHotEncoder", [ROUND], {"cats_int64s": [2, 0, 1]}),
    ("LabelEncoder", [ROUND], {"keys_int64s": [2, 0], "values_floats": [0.5, 1.5], "default_float": -3.0}),
    ("LabelEncoder", [ROUND], {"keys_int64s": [2, 0, -1], "values_int64s": [5, 6, 7]}),
    ("LabelEncoder", [ROUND], {"keys_int64s": [2, 0], "values_floats": [0.0, 1.0], "default_float": 2.0}),
    ("LabelEncoder", [np.round(X)], {"keys_floats": [1.0, 0.0], "values_int64s": [5, 6], "default_int64": 8}),
]

KNOWN = [  # nodes of which an input is known
    ("ArrayFeatureExtractor", [X, np.array([2, 0])], 1),
    ("ArrayFeatureExtractor", [X[0], np.array([[1, 1]])], 1),
    ("ArrayFeatureExtractor", [X[0], np.array([[1], [0], [2]])], 0),
    ("ArrayFeatureExtractor", [np.array([0, 1, 2]), np.array([2, 2, 0])], 0),
]

KEPT = [
    ("TreeEnsembleRegressor", {**ONE_TREE, **{f"target_{k}": v for k, v in LEAVES.items()}, "n_targets": 2}),
    (
        "TreeEnsembleClassifier",
        {**ONE_TREE, **{f"class_{k}": v for k, v in LEAVES.items()}, "classlabels_int64s": [3, 8]},
    ),
    ("SVMRegressor", {**VECTORS, **SUPPORT, "n_supports": 3}),
    (
        "SVMClassifier",
        {**VECTORS, **SUPPORT, "vectors_per_class": [2, 1], "classlabels_ints": [3, 8], "prob_a": [], "prob_b": []},
    ),
    ("LinearClassifier", {"coefficients": [1.0, 2.0, 3.0], "intercepts": [0.5], "classlabels_ints": [0, 1]}),
]
"""Nodes that are kept whole."""


def model_of(op: str, inputs: list[Array], attributes: dict[str, object], known: int = -1) -> onnx.ModelProto:
    kept: dict[str, Any] = {name: value for name, value in attributes.items() if value != []}
    outputs, version = 2 if op.endswith("Classifier") else 1, 4 if op == "LabelEncoder" else 1
    constants = {known: inputs[known]} if known >= 0 else {}
    return one_operator(op, inputs, constants=constants, outputs=outputs, domain="ai.onnx.ml", version=version, **kept)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "known"),
    [*((*case, -1) for case in DEFINED), *((op, inputs, {}, known) for op, inputs, known in KNOWN)],
)
def test_a_defined_node_means_what_it_means_in_onnx_runtime(op, inputs, attributes, known) -> None:
    model = model_of(op, inputs, attributes, known)
    feeds = {f"x{i}": array for i, array in enumerate(inputs) if i != known}
    split, report = fission_with_report(load_model(model))
    assert not report.kept
    found = run(lower_products(split), feeds, exact=False)
    for own, right in zip(found.values(), in_onnxruntime(model, feeds), strict=True):
        assert own.shape == right.shape and own.dtype == right.dtype
        np.testing.assert_allclose(own, right, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("op", "attributes"), KEPT)
def test_a_node_that_is_kept_whole_has_the_types_of_onnx_runtime(op, attributes) -> None:
    model = model_of(op, [X], attributes)
    graph, report = fission_with_report(load_model(model))
    assert len(report.kept) == 1
    found = [graph.types[value] for _, value in graph.outputs]
    assert [(t.shape, t.dtype.numpy) for t in found] == [(a.shape, a.dtype) for a in in_onnxruntime(model, {"x0": X})]
