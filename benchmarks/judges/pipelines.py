"""Models that exporters of scikit-learn, XGBoost and LightGBM, and optimizers write, compared with their libraries.

Toy data: 200 rows of 6 numbers, three classes, and a sum to regress. Models get 40 of the rows; plans are chosen
without measuring. What is not native has its reason in the results. Needs skl2onnx, onnxmltools, scikit-learn, xgboost
and lightgbm.
"""

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import korch
from benchmarks.judges import Judge
from benchmarks.models import build
from korch.ablation import Ablation
from korch.errors import ModelError, UnprovidedError, UnsupportedError
from korch.host.forecast import forecasts
from korch.limits import SearchLimits
from korch.options import Options

ROWS = 40
FAR = 2e-4
"""The largest difference, relative to the largest element or 1: predictions of libraries are of float64."""

VERDICTS = {
    "native": "right, with kernels of Korch's alone",
    "library": "right, partly by kernels of a library",
    "host": "right, partly run by the host",
    "refused": "an error with the reason",
    "wrong": "the results are not those of the library, though ONNX Runtime's are",
    "crash": "any other error",
    "exporter": "ONNX Runtime's results are not those of the library either, and Korch's are ONNX Runtime's",
    "none": "the exporter or the library fails",
}


def _named(module: str, names: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    return {f"{module}.{name}": arguments for name in names.split()}


_FEW, _SEED = {"n_estimators": 8}, {"random_state": 0}
MODELS: Mapping[str, Mapping[str, Any]] = {
    **_named("linear_model", "LogisticRegression RidgeClassifier Perceptron LinearRegression Ridge BayesianRidge"),
    **_named("linear_model", "HuberRegressor PoissonRegressor Lars"),
    **_named("linear_model", "Lasso ElasticNet", alpha=0.01),
    **_named("linear_model", "SGDClassifier", loss="log_loss"),
    **_named("linear_model", "RANSACRegressor", **_SEED),
    **_named("svm", "SVC SVR NuSVR LinearSVC LinearSVR OneClassSVM"),
    **_named("svm", "NuSVC", nu=0.2),
    **_named("tree", "DecisionTreeClassifier DecisionTreeRegressor ExtraTreeClassifier", **_SEED),
    **_named("ensemble", "RandomForestClassifier RandomForestRegressor ExtraTreesClassifier", **_FEW, **_SEED),
    **_named("ensemble", "GradientBoostingClassifier GradientBoostingRegressor IsolationForest", **_FEW, **_SEED),
    **_named("ensemble", "AdaBoostClassifier AdaBoostRegressor BaggingClassifier BaggingRegressor", **_FEW, **_SEED),
    **_named("ensemble", "HistGradientBoostingClassifier HistGradientBoostingRegressor", max_iter=8),
    **_named("neighbors", "KNeighborsClassifier KNeighborsRegressor"),
    **_named("neighbors", "RadiusNeighborsRegressor", radius=5.0),
    **_named("naive_bayes", "GaussianNB BernoulliNB"),
    **_named("neural_network", "MLPClassifier MLPRegressor", max_iter=50, **_SEED),
    **_named("discriminant_analysis", "LinearDiscriminantAnalysis QuadraticDiscriminantAnalysis"),
    **_named("gaussian_process", "GaussianProcessRegressor", alpha=0.1),
    **_named("gaussian_process", "GaussianProcessClassifier"),
    **_named("cross_decomposition", "PLSRegression"),
    **_named("mixture", "GaussianMixture", n_components=3, **_SEED),
    **_named("cluster", "KMeans", n_clusters=3, **_SEED),
    **_named("decomposition", "PCA TruncatedSVD IncrementalPCA"),
    **_named("decomposition", "KernelPCA", n_components=3),
    **_named("preprocessing", "StandardScaler MinMaxScaler MaxAbsScaler RobustScaler Normalizer Binarizer"),
    **_named("preprocessing", "PolynomialFeatures PowerTransformer"),
    **_named("preprocessing", "KBinsDiscretizer", encode="onehot-dense"),
    **_named("preprocessing", "QuantileTransformer", n_quantiles=20),
    **_named("impute", "SimpleImputer KNNImputer"),
    **_named("feature_selection", "VarianceThreshold"),
    **_named("feature_selection", "SelectKBest", k=3),
    **_named("random_projection", "GaussianRandomProjection", n_components=3, **_SEED),
    **_named("xgboost", "XGBClassifier XGBRegressor", max_depth=4, **_FEW),
    **_named("xgboost", "XGBRFClassifier", **_FEW),
    **_named("lightgbm", "LGBMClassifier LGBMRegressor", verbose=-1, **_FEW),
}
"""The arguments of each model, by its module (of scikit-learn, if it is no other library) and name."""

BOOSTED = ("xgboost", "lightgbm")

PIPELINES: Mapping[str, Sequence[str]] = {
    "scaled logistic regression": ("preprocessing.StandardScaler", "linear_model.LogisticRegression"),
    "imputed forest": ("impute.SimpleImputer", "ensemble.RandomForestClassifier"),
    "components and neighbors": ("decomposition.PCA", "neighbors.KNeighborsClassifier"),
    "polynomial ridge": ("preprocessing.PolynomialFeatures", "linear_model.Ridge"),
    "bins and trees": ("preprocessing.KBinsDiscretizer", "ensemble.GradientBoostingClassifier"),
    "selected support vectors": ("preprocessing.MinMaxScaler", "feature_selection.SelectKBest", "svm.SVC"),
}

OPTIMIZED = (
    "mlp",
    "tiny_candy",
    "tiny_transformer",
    "tiny_efficientvit",
    "tiny_yolox",
    "tiny_yolov4",
    "tiny_segformer",
)
"""Benchmark models that ONNX Runtime's optimizer rewrites."""

Case = tuple[onnx.ModelProto, dict[str, np.ndarray], list[np.ndarray]]
"""A model, its inputs, and the predictions of the library."""


@cache
def _data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, their classes and their sums: float32[200, 6], int64[200], float32[200]."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 6)).astype(np.float32)
    classes = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(np.int64) + (x[:, 3] > 1)
    return x, classes, np.exp(0.3 * x @ rng.standard_normal(6)).astype(np.float32)


def _estimator(name: str) -> Any:
    module, _, kind = name.partition(".")
    library = import_module(module if module in BOOSTED else f"sklearn.{module}")
    return getattr(library, kind)(**MODELS[name])


def _fitted(name: str) -> tuple[Any, list[np.ndarray], np.ndarray]:
    """Return a fitted model, its predictions, and the rows that it predicts."""
    from sklearn.base import is_classifier
    from sklearn.pipeline import make_pipeline

    x, classes, sums = _data()
    model = make_pipeline(*map(_estimator, PIPELINES[name])) if name in PIPELINES else _estimator(name)
    if "Imputer" in name or "imputed" in name:
        x = np.where(np.random.default_rng(1).random(x.shape) < 0.1, np.float32("nan"), x)
    model.fit(x, classes if is_classifier(model) or "KBest" in name else sums)
    rows = x[:ROWS]
    if hasattr(model, "transform") and not hasattr(model, "predict"):
        found = model.transform(rows)
        return model, [found.toarray() if hasattr(found, "toarray") else found], rows
    predictions = [model.predict(rows)]
    for method in ("predict_proba", "transform", "decision_function"):
        if hasattr(model, method) and not (method == "decision_function" and len(predictions) > 1):
            predictions.append(getattr(model, method)(rows))
    return model, predictions, rows


def make_case(name: str) -> Case:
    """Return a model as its exporter writes it, with its inputs and the library's predictions."""
    if name in OPTIMIZED:
        return _optimized(name)
    model, predictions, rows = _fitted(name)
    library = name.partition(".")[0]
    if library in BOOSTED:
        import onnxmltools
        from onnxmltools.convert.common.data_types import FloatTensorType

        types = [("x", FloatTensorType([ROWS, rows.shape[1]]))]
        options = {} if library == "xgboost" else {"zipmap": False}
        convert = getattr(onnxmltools, f"convert_{library}")
        return convert(model, initial_types=types, target_opset=15, **options), {"x": rows}, predictions
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType

    types = [("x", FloatTensorType([ROWS, rows.shape[1]]))]
    options = {"zipmap": False} if hasattr(model, "predict_proba") and hasattr(model, "classes_") else {}
    made = to_onnx(model, initial_types=types, options=options, target_opset={"": 18, "ai.onnx.ml": 3})
    return made, {"x": rows}, predictions


def _optimized(name: str) -> Case:
    """Return a benchmark model as ONNX Runtime's optimizer writes it, with the results of the model before."""
    model, options = build(name), onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        feeds = {given.name: np.random.default_rng(0).standard_normal(given.shape).astype(np.float32)}
        return onnx.load(options.optimized_model_filepath), feeds, session.run(None, feeds)


def _is_same(found: Any, right: np.ndarray) -> bool:
    """Return whether an output has the elements of a prediction, whatever its axes of one element."""
    found = np.asarray([[*row.values()] for row in found] if isinstance(found, list) else found)
    if found.size != right.size:
        return False
    found, right = found.reshape(-1).astype(np.float64), np.asarray(right).reshape(-1).astype(np.float64)
    scale = np.abs(right[np.isfinite(right)]).max(initial=1.0)
    return bool(np.allclose(found, right, rtol=FAR, atol=FAR * scale, equal_nan=True))


def _missing(results: Sequence[Any], predictions: Sequence[np.ndarray]) -> bool:
    """Return whether an output is none of the library's predictions."""
    return any(not any(_is_same(found, right) for right in predictions) for found in results)


def verdict(case: Callable[[], Case]) -> tuple[str, str]:
    """Return one of `VERDICTS`, and a message.

    Args:
        case: makes the case; what it raises is the exporter's or the library's fault.
    """
    try:
        model, feeds, predictions = case()
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        theirs = session.run(None, feeds)
    except Exception as error:  # noqa: BLE001 - foreign code, whose errors have no base
        return "none", f"{type(error).__name__}: {error}"[:300]
    try:
        search = SearchLimits(gap=0.9, max_primitives=6, solver_seconds=5.0)
        options = {"threads": 1, "measure": False, "search": search, "ablation": Ablation(baselines=False)}
        results = korch.optimize(model, **options).run(None, feeds)
        forecast = forecasts(model, Options(threads=1), [{}])[0]
    except (ModelError, UnsupportedError, UnprovidedError) as error:
        return "refused", str(error)[:300]
    except Exception as error:  # noqa: BLE001 - a crash, which is what is looked for
        return "crash", f"{type(error).__name__}: {error}"[:300]
    if _missing(results, predictions):
        is_same = all(_is_same(found, np.asarray(right)) for found, right in zip(results, theirs, strict=True))
        return ("exporter", "") if is_same and _missing(theirs, predictions) else ("wrong", "")
    reasons = "; ".join(dict.fromkeys(f"{n.operator}: {n.reason}" for n in (*forecast.host, *forecast.library)))
    return "host" if forecast.host else "library" if forecast.library else "native", reasons


def _run(item: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, text = verdict(lambda: make_case(item))
    library = "onnxruntime" if item in OPTIMIZED else item.partition(".")[0]
    kind = library if library in (*BOOSTED, "onnxruntime") else "pipelines" if item in PIPELINES else "scikit-learn"
    return {"item": item, "counts": {kind: {found: 1}}, "texts": [f"{found}: {text}"] if text else []}


def _items() -> list[str]:
    return [*MODELS, *PIPELINES, *OPTIMIZED]


JUDGE = Judge(_items, _run, VERDICTS, limit_s=120)
