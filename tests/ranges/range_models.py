"""Small models with free dimensions, and the primitives of a model at a size."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from korch.candidate.candidate import Candidate
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.inputs import random_arrays
from korch.pipeline.source import onnx_source
from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.ranges.binding import Bound, binding_of, dimensions_of
from korch.ranges.filled import ends
from korch.ranges.form import Factor, Sizes
from korch.ranges.masked import Masked
from korch.ranges.needed import in_whole_vectors, needs_of_plan
from korch.ranges.samples import LEAST_PLANNED
from korch.ranges.served import Served
from korch.runtime.padding import OutputCut, Padded

Shapes = Mapping[str, Sequence[Bound]]


def model(text: str, **weights: Array) -> bytes:
    """Return a model from the text of its graph, with weights that the text does not declare."""
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(w, name) for name, w in weights.items())
    return proto.SerializeToString()


def weight(*shape: int) -> Array:
    rng = np.random.default_rng(math.prod(shape))
    return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)


def models_in(cases: str) -> dict[str, tuple[str, str]]:
    """Return the inputs with the weights' shapes, and the nodes, of each model of a table, by name."""
    return {
        name: (head, body)
        for block in re.split(r"\n(?=\S)", cases.strip())
        for name, head, body in re.findall(r"(?s)(.*?): (.*?)\n(.*)", block)
    }


def shapes_of(name: str, ranges: Mapping[str, Shapes]) -> Shapes:
    """Return the ranges with whose name the name of a model ends."""
    return ranges[max((end for end in ranges if name.endswith(f" {end}")), key=len)]


def model_of(head: str, body: str, result: str = "float[] y") -> bytes:
    """Return a model of a table."""
    inputs, _, shapes = head.partition(" | ")
    weights = {shape[0]: weight(*map(int, shape[1:].split())) for shape in shapes.split(", ") if shape}
    return model(f"g ({inputs}) => ({result}) {body}", **weights)


def primitives(source: bytes, shapes: Shapes, sizes: Sizes) -> PrimitiveGraph:
    return fission(load_model(source, binding_of(shapes, sizes)))


def masked_model(source: bytes, shapes: Shapes) -> Masked:
    dimensions = dimensions_of(shapes)
    largest = tuple(max(d.high, LEAST_PLANNED) for d in dimensions)
    return onnx_source(source, shapes).masked(largest)


def as_served(whole: Masked, graph: PrimitiveGraph, candidates: Sequence[Candidate], lanes: int) -> list[Candidate]:
    """Return candidates of a masked graph, to which alternatives may have been added, as in a plan for its sizes."""
    found = in_whole_vectors(ends(graph, whole.plan), lanes)
    needed = needs_of_plan(graph, whole.plan, found)

    def served(candidate: Candidate) -> Candidate:
        own = {i: found[p] for i, p in enumerate(candidate.group.numbers_in(graph)) if p in found}
        needs = tuple(needed.get(value, {}) for value in candidate.group.outputs)
        is_whole = candidate.offer.is_in_place or not (own or any(needs))
        return candidate if is_whole else replace(candidate, served=Served(needs, own, whole.plan.sizes))

    return list(map(served, candidates))


def padded(whole: Masked, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs that the user sees, in a plan's sizes."""
    pairs = zip(feeds.items(), whole.plan.inputs, strict=True)
    return {name: Padded(form, array.dtype).fill(array) for (name, array), form in pairs}


def at_sizes(
    source: bytes, shapes: Shapes, whole: Masked, sizes: Sizes
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """Return what the model of a size computes in float64, a masked model's inputs for it, and its masks."""
    graph = primitives(source, shapes, sizes)
    types = {name: graph.types[v] for name, v in graph.inputs}
    feeds = random_arrays({name: (t.shape, t.dtype.numpy) for name, t in types.items()}, sum(sizes))
    masks = {hidden.name: hidden.array(sizes) for hidden in whole.plan.hidden}
    return reference.run(graph, feeds), padded(whole, feeds), masks


def worst_error(source: bytes, shapes: Shapes, whole: Masked, sizes: Sizes, *, without_masks: bool = False) -> float:
    """Return the largest difference between a masked model and the model of a size, both in float64."""
    wanted, given, masks = at_sizes(source, shapes, whole, sizes)
    given |= {name: np.ones_like(mask) for name, mask in masks.items()} if without_masks else masks
    found = reference.run(whole.graph, given)
    errors = [0.0]
    for name, form in zip(wanted, whole.plan.outputs, strict=True):
        part = OutputCut.of(form, sizes).apply(found[name])
        assert part.shape == wanted[name].shape
        assert np.array_equal(np.isnan(part), np.isnan(wanted[name]))
        errors.append(float(np.nanmax(np.abs(part - wanted[name]), initial=0)))
    return max(errors)


def free_factors(form: Sequence[Sequence[Factor]]) -> int:
    return sum(factor.extent is not None for axis in form for factor in axis)


BERT = """
g (int64[batch, length] ids, int64[batch, length] mask) => (float[batch, length, WIDTH] y,
   float[batch, WIDTH] mean, float[batch, WIDTH] first, float[batch, 1, WIDTH] last)
<int64 one = {1}, int64 zero = {0}, int64[1] ones = {1}, int64[1] zeros = {0}, int64[1] minus = {-1},
 int64[1] most = {9223372036854775807}, float minus_many = {-10000}, float one_float = {1},
 int64[4] heads = {0, 0, 2, HALF}, float root = {2}, int64[2] axes = {1, 2}>
{
    words = Gather(table, ids)
    shape = Shape(ids)
    length = Gather(shape, one)
    lengths = Unsqueeze(length, zeros)
    places = Slice(positions, zeros, lengths, zeros)
    x = Add(words, places)
    n = LayerNormalization(x, scale, bias)
    qh = MatMul(n, wq)
    kh = MatMul(n, wk)
    vh = MatMul(n, wv)
    q4 = Reshape(qh, heads)
    k4 = Reshape(kh, heads)
    v4 = Reshape(vh, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q4)
    k = Transpose <perm = [0, 2, 3, 1]> (k4)
    v = Transpose <perm = [0, 2, 1, 3]> (v4)
    scores = MatMul(q, k)
    scaled = Div(scores, root)
    floats = Cast <to = 1> (mask)
    wide = Unsqueeze(floats, axes)
    away = Sub(one_float, wide)
    off = Mul(away, minus_many)
    kept = Add(scaled, off)
    p = Softmax <axis = -1> (kept)
    r = MatMul(p, v)
    rt = Transpose <perm = [0, 2, 1, 3]> (r)
    joined = Reshape(rt, shape3)
    o = MatMul(joined, wo)
    y = Add(n, o)
    mean = ReduceMean <axes = [1], keepdims = 0> (y)
    first = Gather <axis = 1> (y, zero)
    last = Slice(y, minus, most, ones)
}
"""


def bert(most: int = 64, width: int = 8) -> bytes:
    """Return a layer of two heads, for lengths up to `most`."""
    shapes = {"table": (2, width), "positions": (most, width)} | dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width))
    weights = {name: weight(*shape) for name, shape in shapes.items()}
    vectors = {"scale": weight(width) + 1, "bias": weight(width)}
    text = BERT.replace("WIDTH", str(width)).replace("HALF", str(width // 2))
    return model(text, **weights, **vectors, shape3=np.array([0, 0, width]))


CONV = """
g (float[1, 3, height, width] image) => (float[1, 4] y, float[1, 8, h, w] z)
{
    a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (image, w1)
    b = Relu(a)
    c = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (b)
    z = Conv <pads = [1, 1, 1, 1]> (c, w2)
    e = GlobalAveragePool(z)
    f = Flatten(e)
    y = MatMul(f, w3)
}
"""


def conv_net() -> bytes:
    return model(CONV, w1=weight(6, 3, 3, 3), w2=weight(8, 6, 3, 3), w3=weight(8, 4))


PYRAMID = """
g (float[1, 3, size, size] image) => (float[1, places, 5] y, float[1, 5, 1] best, float[1, 5, places] p)
<int64[3] flat = {1, 5, -1}, float[4] twice = {1, 1, 2, 2}>
{
    a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (image, w1)
    b = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (a, w2)
    up = Resize <mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric"> (b, , twice)
    both = Concat <axis = 1> (up, a)
    large = Conv(both, w3)
    small = Conv(b, w4)
    rows = Reshape(large, flat)
    others = Reshape(small, flat)
    all = Concat <axis = 2> (rows, others)
    y = Transpose <perm = [0, 2, 1]> (all)
    best = ReduceMax <axes = [2]> (all)
    p = Softmax <axis = 2> (all)
}
"""


def pyramid() -> bytes:
    """Maps of two sizes, of which the places are joined, as in detectors; for images of multiples of 4."""
    weights = {"w1": weight(6, 3, 3, 3), "w2": weight(8, 6, 3, 3), "w3": weight(5, 14, 1, 1), "w4": weight(5, 8, 1, 1)}
    return model(PYRAMID, **weights)


VIT = """
g (float[batch, 3, 8, 8] image) => (float[batch, 5] y)
<int64 zero = {0}, int64[1] zeros = {0}, int64[3] flat = {0, 8, -1}, int64[2] rest = {1, 8},
 int64[4] heads = {0, 0, 2, 4}, float root = {2}>
{
    patches = Conv <strides = [4, 4]> (image, w)
    flattened = Reshape(patches, flat)
    tokens = Transpose <perm = [0, 2, 1]> (flattened)
    shape = Shape(image)
    batch = Gather(shape, zero)
    batches = Unsqueeze(batch, zeros)
    whole = Concat <axis = 0> (batches, rest)
    first = Expand(start, whole)
    all = Concat <axis = 1> (first, tokens)
    x = Add(all, positions)
    q4 = Reshape(x, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q4)
    k = Transpose <perm = [0, 2, 3, 1]> (q4)
    scores = MatMul(q, k)
    p = Softmax <axis = -1> (scores)
    r = MatMul(p, q)
    rt = Transpose <perm = [0, 2, 1, 3]> (r)
    shape3 = Shape(x)
    joined = Reshape(rt, shape3)
    class = Gather <axis = 1> (joined, zero)
    y = Gemm(class, w5)
}
"""


def vit() -> bytes:
    return model(VIT, w=weight(8, 3, 4, 4), start=weight(1, 1, 8), positions=weight(1, 5, 8), w5=weight(8, 5))
