"""One operator, or a few, along each axis that a range can free: right at four sizes, or refused with a reason."""

import re

import pytest

from korch.errors import UnsupportedError
from korch.ranges.binding import dimensions_of
from korch.validation.standard import has_opaque
from tests.ranges.range_models import Shapes, masked_model, model_of, models_in, shapes_of, worst_error

EXACT = 1e-9

OPAQUE = 1e-6
"""The largest difference of a model with an operator that a library computes in float32, in several threads."""

RANGES: dict[str, Shapes] = {
    "n": {"n": (range(4, 41),)},
    "b": {"b": (range(1, 9),)},
    "hw": {"h": (range(16, 65, 8),), "w": (range(16, 65, 8),)},
    "hw4": {"h": (range(16, 65, 4),), "w": (range(16, 65, 4),)},
    "hw any": {"h": (range(16, 65),), "w": (range(16, 65),)},
    "image": {"h": (range(224, 641, 32),)},
    "bn": {"b": (range(1, 9),), "n": (range(4, 41),)},
}
"""The ranges of the sizes, by name; all free axes of a model are named by a letter of the range's."""

CASES = """
relu n: float[2, 3, n] x
  { y = Relu(x) }
relu hw: float[1, 4, h, w] x
  { y = Relu(x) }
softmax n: float[2, 3, n] x
  { y = Softmax <axis = -1> (x) }
softmax b: float[b, 3, 8] x
  { y = Softmax <axis = 0> (x) }
layer norm n: float[2, 3, n] x
  { m = ReduceMean <axes = [2]> (x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean <axes = [2]> (q) s = Sqrt(v) y =
  Div(d, s) }
instance norm hw: float[1, 4, h, w] x | g 4
  { y = InstanceNormalization(x, g, g) }
group norm hw: float[1, 4, h, w] x | g 2
  <int64[3] k = {0, 2, -1}>{ r = Reshape(x, k) q = InstanceNormalization(r, g, g) s = Shape(x) y = Reshape(q, s) }
mean n: float[2, 3, n] x
  { y = ReduceMean <axes = [2]> (x) }
mean hw: float[1, 4, h, w] x
  { y = ReduceMean <axes = [2, 3]> (x) }
max n: float[2, 3, n] x
  { y = ReduceMax <axes = [2]> (x) }
product n: float[2, 3, n] x
  { y = ReduceProd <axes = [2]> (x) }
std n: float[n, 6] x
  <int64[1] z = {0}, int64[1] o = {1}>{ m = ReduceMean <axes = [0]> (x) d = Sub(x, m) q = Mul(d, d) t = ReduceSum
  (q, z) s = Shape <start = 0, end = 1> (x) l = Sub(s, o) f = Cast <to = 1> (l) v = Div(t, f) y = Sqrt(v) }
argmax n: float[2, 3, n] x
  { y = ArgMax <axis = 2> (x) }
argmax of rows n: float[n, 6] x
  { y = ArgMax <axis = 1> (x) }
matmul n: float[n, 6] x | m 6 5
  { y = MatMul(x, m) }
matmul over n: float[2, 3, n] x
  { t = Transpose <perm = [0, 2, 1]> (x) y = MatMul(x, t) }
gemm b: float[b, 6] x | m 6 5
  { y = Gemm(x, m) }
attention bn: float[b, n, 8] x
  { t = Transpose <perm = [0, 2, 1]> (x) s = MatMul(x, t) p = Softmax(s) y = MatMul(p, x) }
transpose hw: float[1, 4, h, w] x
  { y = Transpose <perm = [0, 2, 3, 1]> (x) }
flatten hw: float[1, 4, h, w] x
  <int64[3] k = {0, 0, -1}>{ y = Reshape(x, k) }
merge bn: float[b, n, 8] x
  <int64[2] k = {-1, 8}>{ y = Reshape(x, k) }
heads bn: float[b, n, 8] x
  <int64[4] k = {0, 0, 2, 4}>{ r = Reshape(x, k) y = Transpose <perm = [0, 2, 1, 3]> (r) }
einsum bn: float[b, n, 8] x
  { y = Einsum <equation = "bnd,bmd->bnm"> (x, x) }
expand n: float[n, 6] x | m 1 6
  { s = Shape(x) e = Expand(m, s) y = Add(x, e) }
where n: float[2, 3, n] x
  <float zero = {0}>{ c = Less(x, zero) y = Where(c, x, zero) }
triangle n: float[n, n] x
  { y = Trilu <upper = 0> (x) }
cumulative sum n: float[2, 3, n] x
  <int64 two = {2}>{ y = CumSum(x, two) }
cumulative sum backward n: float[2, 3, n] x
  <int64 two = {2}>{ y = CumSum <reverse = 1> (x, two) }
positions n: float[n, 6] x
  <int64 zero = {0}, int64 one = {1}, int64[1] o = {1}>{ s = Shape(x) n = Gather(s, zero) r = Range(zero, n, one)
  f = Cast <to = 1> (r) u = Unsqueeze(f, o) y = Add(x, u) }
embedding bn: int64[b, n] x | m 2 8
  { y = Gather(m, x) }

conv 1d n: float[2, 3, n] x | m 4 3 3
  { y = Conv <pads = [1, 1]> (x, m) }
conv stride n: float[2, 3, n] x | m 4 3 3
  { y = Conv <strides = [2], pads = [1, 1]> (x, m) }
conv dilated n: float[1, 3, n] x | m 4 3 3
  { y = Conv <dilations = [2], pads = [2, 2]> (x, m) }
conv causal n: float[2, 3, n] x | m 4 3 3
  { y = Conv <pads = [2, 0]> (x, m) }
conv 2d hw: float[1, 4, h, w] x | m 4 4 3 3
  { y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, m) }
conv patches hw: float[1, 4, h, w] x | m 4 4 8 8
  { y = Conv <strides = [8, 8]> (x, m) }
conv depthwise hw: float[1, 4, h, w] x | m 4 1 5 5
  { y = Conv <pads = [2, 2, 2, 2], group = 4> (x, m) }
conv 2d b: float[b, 4, 6, 6] x | m 4 4 3 3
  { y = Conv <pads = [1, 1, 1, 1]> (x, m) }
conv auto pad hw: float[1, 4, h, w] x | m 4 4 3 3
  { y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, m) }
max pool 2x2 hw: float[1, 4, h, w] x
  { y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }
max pool 2x2 hw4: float[1, 4, h, w] x
  { y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }
max pool 3x3 image: float[1, 1, h, 16] x
  { y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x) }
max pool ceil hw any: float[1, 4, h, w] x
  { y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x) }
max pool dilated hw: float[1, 4, h, w] x
  { y = MaxPool <kernel_shape = [3, 3], dilations = [2, 2], strides = [2, 2]> (x) }
max pool n: float[2, 3, n] x
  { y = MaxPool <kernel_shape = [3], strides = [3]> (x) }
average pool 2x2 hw: float[1, 4, h, w] x
  { y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x) }
average pool padded hw: float[1, 4, h, w] x
  { y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], count_include_pad = 1> (x) }
average pool of elements hw: float[1, 4, h, w] x
  { y = AveragePool <kernel_shape = [3, 3], strides = [1, 1], pads = [1, 1, 1, 1]> (x) }
average pool of elements n: float[2, 3, n] x
  { y = AveragePool <kernel_shape = [3], strides = [2], pads = [1, 1]> (x) }
average pool ceil hw any: float[1, 4, h, w] x
  { y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x) }
global average pool hw: float[1, 4, h, w] x
  { y = GlobalAveragePool(x) }
transposed conv 1d n: float[2, 3, n] x | m 3 4 2
  { y = ConvTranspose <strides = [2]> (x, m) }
transposed conv padded n: float[2, 3, n] x | m 3 4 3
  { y = ConvTranspose <strides = [2], pads = [1, 1], output_padding = [1]> (x, m) }
transposed conv 2d hw: float[1, 4, h, w] x | m 4 4 2 2
  { y = ConvTranspose <strides = [2, 2]> (x, m) }
transposed conv 4x4 hw: float[1, 4, h, w] x | m 4 4 4 4
  { y = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1]> (x, m) }
transposed conv b: float[b, 4, 6, 6] x | m 4 4 2 2
  { y = ConvTranspose <strides = [2, 2]> (x, m) }

resize nearest hw: float[1, 4, h, w] x
  <float[4] twice = {1, 1, 2, 2}, int64 zero = {0}, int64 one = {1}, int64[1] z = {0}, int64[1] o = {1}>{ y =
  Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (x, , twice) }
resize bilinear hw: float[1, 4, h, w] x
  <float[4] twice = {1, 1, 2, 2}, int64 zero = {0}, int64 one = {1}, int64[1] z = {0}, int64[1] o = {1}>{ y =
  Resize <mode = "linear", coordinate_transformation_mode = "half_pixel"> (x, , twice) }
resize bilinear hw any: float[1, 4, h, w] x
  <float[4] twice = {1, 1, 2, 2}, int64 zero = {0}, int64 one = {1}, int64[1] z = {0}, int64[1] o = {1}>{ y =
  Resize <mode = "linear", coordinate_transformation_mode = "half_pixel"> (x, , twice) }
resize bicubic hw: float[1, 4, h, w] x
  <float[4] twice = {1, 1, 2, 2}, int64 zero = {0}, int64 one = {1}, int64[1] z = {0}, int64[1] o = {1}>{ y =
  Resize <mode = "cubic", coordinate_transformation_mode = "half_pixel"> (x, , twice) }
resize corners hw: float[1, 4, h, w] x
  <float[4] twice = {1, 1, 2, 2}, int64 zero = {0}, int64 one = {1}, int64[1] z = {0}, int64[1] o = {1}>{ y =
  Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (x, , twice) }
resize half hw: float[1, 4, h, w] x
  <float[4] half = {1, 1, 0.5, 0.5}>{ y = Resize <mode = "linear", coordinate_transformation_mode = "half_pixel">
  (x, , half) }
resize linear n: float[2, 3, n] x
  <float[3] k = {1, 1, 2}>{ y = Resize <mode = "linear"> (x, , k) }
resize linear b: float[b, 3, 8] x
  <float[3] k = {1, 1, 2}>{ y = Resize <mode = "linear"> (x, , k) }
resize nearest to another hw: float[1, 4, h, w] x
  { p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) s = Shape(x) y = Resize <mode = "nearest",
  nearest_mode = "floor", coordinate_transformation_mode = "asymmetric"> (p, , , s) }
resize bilinear to another hw: float[1, 4, h, w] x
  { p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) s = Shape(x) y = Resize <mode = "linear"> (p, , , s)
  }
resize nearest to another hw any: float[1, 4, h, w] x
  { p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) s = Shape(x) y = Resize <mode = "nearest",
  nearest_mode = "floor", coordinate_transformation_mode = "asymmetric"> (p, , , s) }
resize nearest to a fixed size hw any: float[1, 4, h, w] x
  <int64[4] k = {1, 4, 8, 10}>{ y = Resize <mode = "nearest", nearest_mode = "floor",
  coordinate_transformation_mode = "asymmetric"> (x, , , k) }
up and down again hw: float[1, 3, h, w] x | m 4 3 3 3, t 4 3 2 2, r 2 6 3 3
  <float[4] twice = {1, 1, 2, 2}>{ a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, m) b = MaxPool
  <kernel_shape = [2, 2], strides = [2, 2]> (a) c = Resize <mode = "linear"> (b, , twice) d = Add(a, c)
  e = ConvTranspose <strides = [2, 2]> (d, t) f = Concat <axis = 1> (x, e)
  y = Conv <pads = [1, 1, 1, 1]> (f, r) }
resize to a fixed size hw: float[1, 4, h, w] x
  <int64[4] k = {1, 4, 8, 8}>{ y = Resize <mode = "linear"> (x, , , k) }

rolled windows hw: float[1, h, w, 4] x
  <int64[1] z = {0}, int64[1] k = {3}, int64[1] most = {9999}, int64[1] a = {1}>
  { u = Slice(x, k, most, a) v = Slice(x, z, k, a) r = Concat <axis = 1> (u, v) n = Shape <start = 2, end = 3> (r)
  e = Constant <value = int64[1] {8}> () q = Div(n, e) m = Constant <value = int64[2] {1, -1}> ()
  f = Constant <value = int64[1] {4}> () t = Concat <axis = 0> (m, e, q, e, f) y = Reshape(r, t) }
pool over a concatenation hw: float[1, 4, h, w] x
  { r = Concat <axis = 3> (x, x) y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r) }
slice of a concatenation n: float[2, 3, n] x
  <int64[1] z = {2}, int64[1] e = {-1}, int64[1] a = {2}>{ r = Concat <axis = 2> (x, x) y = Slice(r, z, e, a) }
conv over a concatenation with ends n: float[2, 3, n] x | m 4 3 3
  <int64[1] z = {2}, int64[1] e = {-1}, int64[1] a = {2}>{ u = Slice(x, z, e, a) r = Concat <axis = 2> (x, u)
  y = Conv <pads = [1, 1]> (r, m) }
pad zeros hw: float[1, 4, h, w] x
  <int64[8] p = {0, 0, 1, 2, 0, 0, 2, 1}>{ y = Pad(x, p) }
pad reflect hw: float[1, 4, h, w] x
  <int64[8] p = {0, 0, 3, 2, 0, 0, 2, 3}>{ y = Pad <mode = "reflect"> (x, p) }
pad edge hw: float[1, 4, h, w] x
  <int64[8] p = {0, 0, 3, 2, 0, 0, 2, 3}>{ y = Pad <mode = "edge"> (x, p) }
pad reflect n: float[2, 3, n] x
  <int64[6] p = {0, 0, 3, 0, 0, 2}>{ y = Pad <mode = "reflect"> (x, p) }
pixel shuffle hw: float[1, 4, h, w] x
  { y = DepthToSpace <blocksize = 2, mode = "CRD"> (x) }
pixel unshuffle hw: float[1, 4, h, w] x
  { y = SpaceToDepth <blocksize = 2> (x) }
windows hw: float[1, h, w, 4] x
  <int64[1] eight = {8}, int64[1] one = {1}, int64[1] four = {4}, int64[3] flat = {-1, 64, 4}>{ s = Shape(x) h =
  Shape <start = 1, end = 2> (x) w = Shape <start = 2, end = 3> (x) a = Div(h, eight) b = Div(w, eight) k = Concat
  <axis = 0> (one, a, eight, b, eight, four) c = Reshape(x, k) d = Transpose <perm = [0, 1, 3, 2, 4, 5]> (c) e =
  Reshape(d, flat) p = Softmax <axis = 1> (e) l = Concat <axis = 0> (one, a, b, eight, eight, four) f = Reshape(p,
  l) g = Transpose <perm = [0, 1, 3, 2, 4, 5]> (f) y = Reshape(g, s) }
chunk channels hw: float[1, 4, h, w] x
  { a, c = Split <axis = 1> (x) y = Mul(a, c) }
chunk hw: float[1, 4, h, w] x
  { a, c = Split <axis = 2> (x) y = Mul(a, c) }
first half hw: float[1, 4, h, w] x
  { a, c = Split <axis = 2> (x) y = Relu(a) }
every second n: float[2, 3, n] x
  <int64[1] z = {0}, int64[1] m = {9999}, int64[1] t = {2}, int64[1] p = {2}>{ y = Slice(x, z, m, t, p) }
without ends n: float[2, 3, n] x
  <int64[1] s = {1}, int64[1] e = {-1}, int64[1] t = {2}>{ y = Slice(x, s, e, t) }
last n: float[2, 3, n] x
  <int64[1] s = {-1}, int64[1] e = {9999}, int64[1] t = {2}>{ y = Slice(x, s, e, t) }
last three n: float[2, 3, n] x
  <int64[1] s = {-3}, int64[1] e = {9999}, int64[1] t = {2}>{ y = Slice(x, s, e, t) }
flip n: float[2, 3, n] x
  <int64[1] s = {-1}, int64[1] e = {-9999}, int64[1] t = {2}, int64[1] p = {-1}>{ y = Slice(x, s, e, t, p) }
shift n: float[2, 3, n] x
  <int64[1] z = {0}, int64[1] o = {1}, int64[1] m = {9999}, int64[1] t = {2}>{ a = Slice(x, o, m, t) b = Slice(x,
  z, o, t) y = Concat <axis = 2> (a, b) }
tile n: float[2, 3, n] x
  <int64[3] k = {1, 1, 2}>{ y = Tile(x, k) }
tile b: float[b, 3, 8] x
  <int64[3] k = {1, 2, 1}>{ y = Tile(x, k) }
concat n: float[2, 3, n] x
  { r = Relu(x) y = Concat <axis = 2> (x, r) }
concat hw: float[1, 4, h, w] x
  { r = Relu(x) y = Concat <axis = 1> (x, r) }

top k n: float[2, 3, n] x
  <int64[1] k = {2}>{ y, i = TopK(x, k) }
top k of rows n: float[n, 6] x
  <int64[1] k = {2}>{ y, i = TopK(x, k) }
sort n: float[2, 3, n] x
  { s = Shape <start = 2, end = 3> (x) y, i = TopK <largest = 0> (x, s) }
gather n: float[2, 3, n] x
  <int64[3] i = {3, 0, 2}>{ y = Gather <axis = 2> (x, i) }
gather of rows n: float[n, 6] x
  <int64[3] i = {3, 0, 2}>{ y = Gather <axis = 1> (x, i) }
gather elements of rows n: float[n, 6] x, int64[n, 2] i
  { y = GatherElements <axis = 1> (x, i) }
gather elements n: float[2, n] x, int64[2, 3] i
  { y = GatherElements <axis = 1> (x, i) }
grid sample b: float[b, 2, 5, 5] x, float[b, 3, 3, 2] g
  { y = GridSample(x, g) }
grid sample hw: float[1, 2, 5, 5] x, float[1, h, w, 2] g
  { y = GridSample(x, g) }
lstm b: float[5, b, 4] x | m 1 12 4, r 1 12 3
  { y, h, c = LSTM <hidden_size = 3> (x, m, r) }
lstm n: float[n, 2, 4] x | m 1 12 4, r 1 12 3
  { y, h, c = LSTM <hidden_size = 3> (x, m, r) }
lstm both directions n: float[n, 2, 4] x | m 2 12 4, r 2 12 3
  { y, h, c = LSTM <hidden_size = 3, direction = "bidirectional"> (x, m, r) }
lstm reverse bn: float[n, b, 4] x | m 1 12 4, r 1 12 3
  { y, h, c = LSTM <hidden_size = 3, direction = "reverse"> (x, m, r) }
gru n: float[n, 2, 4] x | m 1 9 4, r 1 9 3
  { y, h = GRU <hidden_size = 3, linear_before_reset = 1> (x, m, r) }
gru state n: float[n, 2, 4] x | m 1 9 4, r 1 9 3
  { h, y = GRU <hidden_size = 3> (x, m, r) }
whole lstm b: float[5, b, 4] x | m 1 12 4, r 1 12 3
  { y, h, c = LSTM <hidden_size = 3, clip = 9.0> (x, m, r) }
whole lstm n: float[n, 2, 4] x | m 1 12 4, r 1 12 3
  { y, h, c = LSTM <hidden_size = 3, clip = 9.0> (x, m, r) }
whole lstm both directions n: float[n, 2, 4] x | m 2 12 4, r 2 12 3
  { y, h, c = LSTM <hidden_size = 3, clip = 9.0, direction = "bidirectional"> (x, m, r) }
whole lstm reverse bn: float[n, b, 4] x | m 1 12 4, r 1 12 3
  { y, h, c = LSTM <hidden_size = 3, clip = 9.0, direction = "reverse"> (x, m, r) }
whole gru n: float[n, 2, 4] x | m 1 9 4, r 1 9 3
  { y, h = GRU <hidden_size = 3, clip = 9.0, linear_before_reset = 1> (x, m, r) }
whole gru state n: float[n, 2, 4] x | m 1 9 4, r 1 9 3
  { h, y = GRU <hidden_size = 3, clip = 9.0> (x, m, r) }
"""
"""Each has a name that ends with its range, its inputs, the shapes of its weights, and its nodes with result `y`."""

MODELS = models_in(CASES)


REFUSED = {
    "average pool ceil hw any": "the model has other steps at some of the sizes",
    "resize to a fixed size hw": "the model has other steps at some of the sizes",
}


def sizes_of(shapes: Shapes) -> list[tuple[int, ...]]:
    """Return the first and the last sizes, and four between them, in steps."""
    dimensions = dimensions_of(shapes)
    shares = [[0, 0], [1, 1], [0.3, 0.8], [0.55, 0.1], [0.97, 0.5], [0.05, 0.97]]
    return [tuple(d.low + round(at[i] * (d.high - d.low)) for i, d in enumerate(dimensions)) for at in shares]


@pytest.mark.parametrize("name", MODELS)
def test_an_operator_along_free_axes(name: str) -> None:
    shapes = shapes_of(name, RANGES)
    source = model_of(*MODELS[name], "int64[] y" if name.startswith("argmax") else "float[] y")
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=re.escape(REFUSED[name])):
            masked_model(source, shapes)
        return
    whole = masked_model(source, shapes)
    limit = OPAQUE if has_opaque(whole.graph) else EXACT
    assert max(worst_error(source, shapes, whole, sizes) for sizes in sizes_of(shapes)) < limit
