"""Seeded random ONNX graphs of all operators that fission knows, with random attributes.

ONNX Runtime runs each node on the values before it, so a graph that Korch refuses is a defect. Step
functions, comparisons, functions with poles and quotients read only values that are exact in every
implementation, because for other values a rounding error could change the result a lot.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from korch.primitive.op import Array
from tests.support import random_onnx_shapes as shapes
from tests.support.random_onnx_bodies import in_functions
from tests.support.random_onnx_families import draw_fragment
from tests.support.random_onnx_fragment import Fragment
from tests.support.random_onnx_shapes import OPSETS, Part

MOST_ELEMENTS = 1 << 13
LARGEST = 1e3
"""Later nodes do not read values with larger elements, unless these are exact."""

TRIES = 12
FRAGMENTS = 0.35
"""The share of fragments of several nodes, or of operators with several outputs or bodies."""

DTYPES = (np.float32, np.float64, np.float16, np.int32, np.int64)
DTYPE_WEIGHTS = (0.84, 0.04, 0.04, 0.04, 0.04)
SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17)
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e30, 1e-40)

SMOOTH: dict[str, dict[str, Any]] = {
    "Abs": {},
    "Neg": {},
    "Relu": {},
    "Sigmoid": {},
    "Tanh": {},
    "Erf": {},
    "Sin": {},
    "Cos": {},
    "Atan": {},
    "Asinh": {},
    "Softplus": {},
    "Softsign": {},
    "Elu": {"alpha": 0.7},
    "Selu": {},
    "Celu": {"alpha": 1.5},
    "LeakyRelu": {"alpha": 0.2},
    "HardSigmoid": {"alpha": 0.3},
    "HardSwish": {},
    "Mish": {},
    "Gelu": {"approximate": "tanh"},
    "Exp": {},
    "Identity": {},
    "Cosh": {},
    "Sinh": {},
    "Dropout": {},
}
SENSITIVE: dict[str, dict[str, Any]] = {
    "Floor": {},
    "Ceil": {},
    "Round": {},
    "Sign": {},
    "Sqrt": {},
    "Log": {},
    "Reciprocal": {},
    "Tan": {},
    "Acos": {},
    "Asin": {},
    "Acosh": {},
    "Atanh": {},
    "IsNaN": {},
    "IsInf": {"detect_negative": 0},
    "Shrink": {"lambd": 0.4, "bias": 0.1},
    "ThresholdedRelu": {"alpha": 0.3},
    "BitwiseNot": {},
    "Not": {},
}
BINARY = ("Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean", "PRelu")
SENSITIVE_BINARY = (
    "Div",
    "Pow",
    "Mod",
    "Equal",
    "Greater",
    "Less",
    "GreaterOrEqual",
    "LessOrEqual",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
)
EXACT = frozenset(
    {
        "Identity",
        "Neg",
        "Abs",
        "Relu",
        "Transpose",
        "Reshape",
        "Slice",
        "Pad",
        "Tile",
        "Concat",
        "Gather",
        "Expand",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Trilu",
        "DepthToSpace",
        "SpaceToDepth",
        "MaxPool",
        "Split",
        "Max",
        "Min",
        "ReduceMax",
        "ReduceMin",
        "Dropout",
        "GlobalMaxPool",
    }
)
"""Operators whose results are not rounded by any implementation."""


@dataclass
class Drawn:
    """A random graph, with inputs and expected result."""

    feeds: dict[str, Array]  # the inputs
    is_special: bool  # whether a value is a float tensor with NaN or infinities
    is_folded: bool = False  # whether the inputs are constants, so that the whole graph is folded
    defaults: tuple[str, ...] = ()  # the constants that are inputs with these defaults
    others: tuple[str, ...] = ()  # the constants that are inputs with other defaults, so that they must be given
    calls: int | None = None  # the seed of the choice which nodes are calls of local functions; None for none
    other: Any = None  # the result of `onnx.reference` if it differs from ONNX Runtime's and no third opinion decides.
    nodes: list[Any] = field(default_factory=list)  # the nodes in order; their names begin with the graph's prefix
    constants: list[Any] = field(default_factory=list)  # the initializers
    output: str = ""  # the name of the output
    expected: Any = None  # the result of ONNX Runtime, which runs node by node
    operators: list[str] = field(default_factory=list)  # the types of the nodes

    @property
    def given(self) -> dict[str, Array]:
        """The inputs of a run."""
        others = {c.name: numpy_helper.to_array(c) for c in self.constants if c.name in self.others}
        return others if self.is_folded else self.feeds | others

    @property
    def values(self) -> dict[str, Array]:
        """All inputs, with those that a run need not be given."""
        defaults = {c.name: numpy_helper.to_array(c) for c in self.constants if c.name in self.defaults}
        return self.given | defaults


def model_of(graphs: list[Drawn], opset: int) -> onnx.ModelProto:
    """Return one model that contains several independent graphs."""
    inputs = [_info(n, a) for g in graphs for n, a in g.given.items()]
    constants = [_other(c) if c.name in g.others else c for g in graphs for c in g.constants]
    for g in graphs:
        inputs += [_info(c.name, numpy_helper.to_array(c)) for c in g.constants if c.name in g.defaults]
        constants += [numpy_helper.from_array(a, n) for n, a in g.feeds.items()] if g.is_folded else []
    outputs = [helper.make_empty_tensor_value_info(g.output) for g in graphs]
    graph = helper.make_graph([n for g in graphs for n in g.nodes], "fuzz", inputs, outputs, constants)
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    seeds = [g.calls for g in graphs if g.calls is not None]
    return in_functions(np.random.default_rng(seeds[0]), model) if seeds else model


def _other(constant: Any) -> Any:
    """Return a constant of the same type and shape with other elements."""
    array = numpy_helper.to_array(constant)
    return numpy_helper.from_array(array * np.float32(0.5) + np.float32(1), constant.name)


def _info(name: str, array: Array) -> Any:
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, dtype, array.shape)


Run = Callable[[onnx.ModelProto, dict[str, Array]], list[Array] | None]
"""Runs a model; returns its output, or two arrays if references differ; None if the model can't be run."""


def random_onnx(rng: np.random.Generator, opset: int, prefix: str, run: Run) -> Drawn | None:
    """Return a random graph; None if no node could be drawn.

    Args:
        rng: the source of all choices.
        opset: the opset of the graph, one of `OPSETS`.
        prefix: the prefix of all names.
        run: runs models of single nodes.
    """
    x = _input(rng)
    name = f"{prefix}_x"
    drawn = Drawn({name: x}, is_special=x.dtype.kind == "f" and not np.isfinite(x).all())
    known: dict[str, tuple[Array, bool]] = {name: (x, True)}
    for step in range(int(rng.integers(1, 5))):
        for _ in range(TRIES):
            source = name if rng.random() < 0.8 else str(rng.choice(list(known)))
            made = _node(rng, known, source, f"{prefix}_{step}", opset, run)
            if made is None:
                continue
            fragment, results, is_exact = made
            drawn.nodes += fragment.nodes
            drawn.constants += fragment.constants
            drawn.operators += [node.op_type for node in fragment.nodes]
            name = f"{prefix}_{step}"
            known[name] = (results[0], is_exact)
            drawn.is_special |= results[0].dtype.kind == "f" and not np.isfinite(results[0]).all()
            drawn.other = results[1] if len(results) > 1 else None
            break
        if drawn.other is not None:
            break
    drawn.output, drawn.expected = name, known[name][0]
    drawn.is_folded = rng.random() < 0.2
    if rng.random() < 0.1:
        floats = [c for c in drawn.constants if c.data_type == onnx.TensorProto.FLOAT]
        drawn.defaults = tuple(c.name for c in floats if len(c.dims) == 1 or rng.integers(2))  # vectors may be sizes
        if not {"If", "Loop", "Scan"} & set(drawn.operators):  # these may make all defaults constants
            drawn.others = tuple(c.name for c in floats if c.name not in drawn.defaults)
    drawn.calls = int(rng.integers(1 << 30)) if rng.random() < 0.15 else None
    return drawn if drawn.nodes else None


def _input(rng: np.random.Generator) -> Array:
    rank = int(rng.choice([1, 2, 3, 4, 5], p=[0.2, 0.2, 0.2, 0.35, 0.05]))
    shape = [int(n) for n in rng.choice(SIZES, rank)]
    if rng.random() < 0.04:
        shape[int(rng.integers(rank))] = 0
    while math.prod(shape) > 2048:
        shape[int(np.argmax(shape))] = 2
    dtype = DTYPES[int(rng.choice(len(DTYPES), p=DTYPE_WEIGHTS))]
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-9, 10, shape).astype(dtype)
    x = rng.standard_normal(shape).astype(dtype)
    if rng.random() < 0.08 and x.size:
        at = rng.integers(0, x.size, int(rng.integers(1, 4)))
        with np.errstate(over="ignore"):
            x.reshape(-1)[at] = rng.choice(SPECIAL, len(at))
    return x


def _node(
    rng: np.random.Generator, known: dict[str, tuple[Array, bool]], source: str, out: str, opset: int, run: Run
) -> tuple[Fragment, list[Array], bool] | None:
    """Draw a node, or a fragment of several, that the references run; None if this fails.

    Return it, its result or the two that the references give, and whether the result is exact.
    """
    x, is_exact = known[source]
    finite = x[np.isfinite(x)] if x.dtype.kind == "f" else x
    if np.abs(finite).max(initial=0) > LARGEST and not is_exact:
        return None
    feeds = {source: x}
    try:
        if rng.random() < FRAGMENTS:
            is_tame = is_exact and finite.size == x.size and np.abs(finite).max(initial=0) < 99
            fragment = draw_fragment(rng, x, opset, source, out, is_exact=is_tame)
            is_exact = False
        else:
            part = _draw(rng, x, is_exact, opset, known, source)
            fragment, is_exact = (None, False) if part is None else _fragment(part, known, feeds, source, out, is_exact)
    except (ValueError, IndexError, ZeroDivisionError, OverflowError):  # there is nothing to choose from
        return None
    if fragment is None:
        return None
    graph = helper.make_graph(
        fragment.nodes,
        "one",
        [_info(n, a) for n, a in feeds.items()],
        [helper.make_empty_tensor_value_info(out)],
        fragment.constants,
    )
    imports = [helper.make_opsetid("", opset)]
    results = run(helper.make_model(graph, opset_imports=imports, ir_version=10), feeds)
    if results is None or not isinstance(results[0], np.ndarray):
        return None
    result = results[0]
    if result.size > MOST_ELEMENTS or result.dtype.kind not in "fiub" or not result.ndim:
        return None
    return fragment, results, is_exact


def _fragment(
    part: Part, known: dict[str, tuple[Array, bool]], feeds: dict[str, Array], source: str, out: str, is_exact: bool
) -> tuple[Fragment, bool]:
    """Return a node with its constants, and whether its result is exact; values that it reads are added to feeds."""
    constants, names = [], [""] * (1 + max(part.at, *part.inputs, 0))
    names[part.at] = source
    for position, item in part.inputs.items():
        if isinstance(item, str):
            names[position] = item
            feeds[item], also_exact = known[item]
            is_exact = is_exact and also_exact
        else:
            names[position] = f"{out}_{position}"
            constants.append(numpy_helper.from_array(np.asarray(item), names[position]))
    node = helper.make_node(part.op, names, [out], **part.attributes)
    return Fragment([node], constants), is_exact and part.op in EXACT


def _draw(
    rng: np.random.Generator, x: Array, is_exact: bool, opset: int, known: dict[str, tuple[Array, bool]], source: str
) -> Part | None:
    kind = rng.random()
    if kind < 0.12:
        op = str(rng.choice(list(SMOOTH)))
        return Part(op, dict(SMOOTH[op]))
    if kind < 0.18 and is_exact:
        op = str(rng.choice(list(SENSITIVE)))
        return Part(op, dict(SENSITIVE[op]))
    if kind < 0.30:
        sensitive = is_exact and rng.random() < 0.4
        op = str(rng.choice(SENSITIVE_BINARY if sensitive else BINARY))
        return _binary(rng, op, x, known, source)
    return shapes.draw(rng, x, opset, is_exact)


def _binary(rng: np.random.Generator, op: str, x: Array, known: dict[str, tuple[Array, bool]], source: str) -> Part:
    """Return a node of two operands; the second one is a broadcast constant, or a value of the same shape and type."""
    alike = [n for n, (a, _) in known.items() if a.shape == x.shape and a.dtype == x.dtype]
    position = int(rng.integers(2)) if op != "PRelu" else 1
    attributes = {"fmod": 1} if op == "Mod" and x.dtype.kind == "f" else {}
    if len(alike) > 1 and rng.random() < 0.4 and op != "PRelu":
        return Part(op, attributes, {position: str(rng.choice(alike))}, at=1 - position)
    small = [n if rng.integers(2) else 1 for n in x.shape]
    small = small[int(rng.integers(len(small) + 1)) :]
    number = rng.uniform(0.5, 2, small) * rng.choice([-1, 1], small)
    other = (np.ceil(np.abs(3 * number)) if x.dtype.kind in "iu" else number).astype(x.dtype)
    return Part(op, attributes, {position: other}, at=1 - position)


__all__ = ["OPSETS", "Drawn", "model_of", "random_onnx"]
