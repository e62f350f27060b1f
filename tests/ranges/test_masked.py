"""Masked graphs: at each size of a range they compute what the model computes, and unsafe models are refused."""

import itertools
import re

import numpy as np
import pytest

from korch.errors import UnsupportedError
from korch.primitive import reference
from korch.primitive.op import Category
from tests.ranges.range_models import (
    bert,
    conv_net,
    free_factors,
    masked_model,
    model,
    padded,
    pyramid,
    vit,
    weight,
    worst_error,
)

EXACT = 1e-12


def test_every_length_of_a_bert_like_model() -> None:
    shapes = {"batch": (1,), "length": (range(1, 65),)}
    whole = masked_model(bert(), shapes)
    assert max(worst_error(bert(), shapes, whole, (n,)) for n in range(1, 65)) < EXACT
    kinds = [hidden.kind for hidden in whole.plan.hidden]
    # Scores, values, elements of the mean and its count; the one that is last.
    assert sorted(kinds) == ["end", "mask", "mask", "number", "sizes"]


def test_two_dimensions_at_once() -> None:
    shapes = {"batch": (range(1, 6),), "length": (range(2, 20),)}
    whole = masked_model(bert(), shapes)
    for sizes in [(1, 2), (5, 19), (4, 18), (2, 7), (1, 19), (5, 2), (3, 8)]:
        assert worst_error(bert(), shapes, whole, sizes) < EXACT


def test_every_image_size_of_a_convolutional_network() -> None:
    shapes = {"height": (range(5, 30),), "width": (range(9, 24),)}
    whole = masked_model(conv_net(), shapes)
    sizes = [(h, 9 + h * 7 % 15) for h in range(5, 30)] + [(5, 9), (29, 23)]
    assert max(worst_error(conv_net(), shapes, whole, pair) for pair in sizes) < EXACT


def test_a_free_axis_of_an_input_by_its_name() -> None:
    shapes = {"image": (1, 3, range(6, 20), 12)}
    whole = masked_model(conv_net(), shapes)
    assert max(worst_error(conv_net(), shapes, whole, (n,)) for n in range(6, 20)) < EXACT


def test_a_free_batch_needs_no_mask() -> None:
    shapes = {"batch": (range(1, 18),)}
    whole = masked_model(vit(), shapes)
    assert [hidden.kind for hidden in whole.plan.hidden] == ["sizes"]  # for kernels
    assert max(worst_error(vit(), shapes, whole, (n,)) for n in range(1, 18)) < EXACT


def test_maps_of_several_sizes_are_joined() -> None:
    """What follows a free part of a concatenation begins behind its largest size; sizes are multiples of 4."""
    source, shapes = pyramid(), {"size": (range(4, 41, 4),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(1, 11)) < EXACT
    assert worst_error(source, shapes, whole, (3,), without_masks=True) > 0.01


BEHIND = """
g (float[1, 4, n] x, float[1, 4, 3] new) => (float[1, 4, m] y, float[1, 4, 4] z, float[1, 4, k] b)
{
    y = Concat <axis = 2> (x, x, new)
    t = Transpose <perm = [0, 2, 1]> (y)
    z = MatMul(y, t)
    p = Less(x, x)
    q = Less(new, new)
    r = Concat <axis = 2> (p, q)
    b = Cast <to = 1> (r)
}
"""


def test_something_is_put_behind_a_free_axis() -> None:
    source, shapes = model(BEHIND), {"n": (range(1, 9),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(1, 9)) < EXACT


NAN_BEHIND = """
g (float[n, 4] x) => (float[1, 4] y, float[n, 4] z, float[4, 4] w)
{
    one = Div(x, x)
    y = ReduceMax <axes = [0]> (one)
    z = Softmax <axis = 0> (one)
    t = Transpose <perm = [1, 0]> (one)
    w = MatMul(t, x)
}
"""


def test_what_is_not_a_number_behind_the_elements_is_kept_out() -> None:
    source, shapes = model(NAN_BEHIND), {"n": (range(1, 14),)}
    whole = masked_model(source, shapes)
    for n in range(1, 14):
        assert worst_error(source, shapes, whole, (n,)) < EXACT
    # Without masks 0 / 0 behind the elements comes into all results.
    with pytest.raises(AssertionError):
        worst_error(source, shapes, whole, (3,), without_masks=True)


POOLED = """
g (float[1, 2, n, n] x) => (float[1, 2, m, m] y)
{
    y = MaxPool <kernel_shape = [5, 5], pads = [2, 2, 2, 2]> (x)
}
"""


def test_a_maximum_of_pads_only_is_finite_behind_the_elements() -> None:
    source, shapes = model(POOLED), {"n": (range(1, 14),)}
    whole = masked_model(source, shapes)
    for n in (1, 6, 13):
        assert worst_error(source, shapes, whole, (n,)) < EXACT
    given = padded(whole, {"x": np.ones((1, 2, 6, 6), np.float32)})
    given |= {hidden.name: hidden.array((6,)) for hidden in whole.plan.hidden}
    assert np.isfinite(reference.run(whole.graph, given)["y"]).all()


MERGED = """
g (float[2, n, 4] x) => (float[m, 4] y, float[k] z)
<int64[2] rows = {-1, 4}, int64[1] flat = {-1}, int64[1] axes = {0}>
{
    y = Reshape(x, rows)
    s = ReduceSum <keepdims = 1> (y, axes)
    shape = Shape(x)
    again = Reshape(y, shape)
    t = Add(again, s)
    z = Reshape(t, flat)
}
"""


def test_axes_that_are_merged_and_split_again() -> None:
    source = model(MERGED)
    shapes = {"n": (range(1, 12),)}
    whole = masked_model(source, shapes)
    assert [free_factors(form) for form in whole.plan.outputs] == [1, 1]
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(1, 12)) < EXACT


FROM_THE_END = """
g (float[n] x) => (float[n] y)
<int64 zero = {0}, int64 one = {1}, int64 most = {MOST}>
{
    s = Shape(x)
    n = Squeeze(s)
    r = Range(zero, n, one)
    d = Sub(n, r)
    h = Min(d, r, most)
    f = Cast <to = 1> (h)
    y = Add(x, f)
}
"""


def test_tables_of_which_both_ends_are_the_same_for_all_sizes() -> None:
    shapes = {"n": (range(3, 22),)}
    source = model(FROM_THE_END.replace("MOST", "2"))
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(3, 22)) == 0


def test_constants_of_which_each_of_a_few_sizes_has_its_own() -> None:
    shapes, source = {"n": (range(3, 22),)}, model(FROM_THE_END.replace("MOST", "99"))
    whole = masked_model(source, shapes)
    assert [hidden.kind for hidden in whole.plan.hidden] == ["table", "sizes"]
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(3, 22)) == 0
    with pytest.raises(UnsupportedError, match="the elements of a constant depend on the size"):
        masked_model(source, {"n": (range(3, 100),)})


LOGARITHM = """
g (float[n, 4] x) => (float[n, 4] y)
<int64 z = {0}>
{
    s = Shape(x)
    n = Gather(s, z)
    f = Cast <to = 1> (n)
    l = Log(f)
    y = Mul(x, l)
}
"""


def test_numbers_of_which_each_of_a_few_sizes_has_its_own() -> None:
    shapes, source = {"n": (range(2, 12),)}, model(LOGARITHM)
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(2, 12)) == 0
    with pytest.raises(UnsupportedError, match="which no dimension explains"):
        masked_model(source, {"n": (range(2, 100),)})


CHOSEN = """
g (float[n, 5] x, int64[n, 2] i) => (float[n, 2] y)
{
    y = GatherElements <axis = 1> (x, i)
}
"""


RUNNING = """
g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z)
<int64 zero = {0}, int64 one = {1}>
{
    e = Exp(x)
    y = CumSum <reverse = 1, exclusive = 1> (e, zero)
    c = CumSum(x, zero)
    z = CumSum <reverse = 1> (c, one)
}
"""


def test_running_sums() -> None:
    source, shapes = model(RUNNING), {"n": (range(1, 9),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(1, 9)) < EXACT
    assert worst_error(source, shapes, whole, (3,), without_masks=True) > 0.01


def test_chosen_elements() -> None:
    source, shapes = model(CHOSEN), {"n": (range(1, 9),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(1, 9)) < EXACT


WHOLE = {
    "TopK <axis = 0> (x, k)": "float[n, 5] x",
    "TopK <axis = 0, largest = 0> (x, k)": "float[n, 5] x",
    "TopK <axis = 1> (x, k)": "float[n, 5] x",
    "Hardmax <axis = 0> (x)": "float[n, 5] x",
    "Hardmax <axis = 1> (x)": "float[n, 5] x",
    "ScatterElements <axis = 1> (x, i, u)": "float[n, 5] x, int64[n, 2] i, float[n, 2] u",
    'ScatterElements <axis = 1, reduction = "add"> (x, i, u)': "float[n, 5] x, int64[n, 2] i, float[n, 2] u",
    "ConvTranspose(x, w)": "float[n, 3, 4] x",
    'GridSample <mode = "linear"> (x, u)': "float[n, 2, 4, 3] x, float[n, 2, 5, 2] u",
    'GridSample <mode = "nearest"> (x, u) ': "float[1, 2, 4, 3] x, float[1, 2, n, 2] u",
    "LSTM <hidden_size = 2, clip = 9.0> (x, w8, r8)": "float[4, n, 3] x",
    'GRU <hidden_size = 2, clip = 9.0, direction = "reverse"> (x, w6, r6, , , u)': "float[4, n, 3] x, float[1, n, 2] u",
    "RNN <hidden_size = 2, clip = 9.0> (x, w2, r2)": "float[4, n, 3] x",
    "LpPool <kernel_shape = [2]> (x)": "float[n, 2, 5] x",
    "MaxPool <kernel_shape = [2]> (x)": "float[n, 2, 5] x",
    "RoiAlign <output_height = 2, output_width = 2> (x, u, j)": "float[2, 2, 6, 6] x, float[n, 4] u, int64[n] j",
}


@pytest.mark.parametrize("call", WHOLE)
def test_operators_that_are_not_split(call: str) -> None:
    counts = {"TopK": 2, "LSTM": 3, "GRU": 2, "RNN": 2, "MaxPool": 2}
    names = ["y", "z", "h"][: counts.get(call.split()[0].partition("(")[0], 1)]
    outputs = ", ".join(f"{'int64' if name == 'z' and call[0] in 'TM' else 'float'} {name}" for name in names)
    weights = {f"{w}{g}": weight(1, g, size) for g in (8, 6, 2) for w, size in (("w", 3), ("r", 2))}
    source = model(
        f"g ({WHOLE[call]}) => ({outputs}) <int64[1] k = {{2}}> {{ {', '.join(names)} = {call} }}",
        **weights,
        w=weight(3, 2, 2),
    )
    shapes = {"n": (range(2, 8),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(2, 8)) < 1e-6


def test_nan_is_the_greatest_element() -> None:
    source = model("g (float[n] x) => (float[] y) <int64[1] k = {4}> { r = Sqrt(x) y, i = TopK <largest = 0> (r, k) }")
    shapes = {"n": (range(4, 9),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(4, 9)) < EXACT


SOFT = """
g (float[n, n] x) => (float[n, 3] y, float[n, n] p)
<int64[1] zero = {0}, float none = {0}>
{
    shape = Shape <start = 0, end = 1> (x)
    v = Slice(table, zero, shape, zero)
    infinite = Div(x, none)
    p = Softmax <axis = -1> (infinite)
    y = MatMul(p, v)
}
"""


def test_infinite_rows_of_a_softmax() -> None:
    """A row of which the maximum is infinite is NaN in the model, and in the masked graph."""
    source, shapes = model(SOFT, table=weight(16, 3)), {"n": (range(1, 17),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(1, 17)) < EXACT


def one(body: str, inputs: str = "float[n, 4] x", output: str = "float[a, b] y") -> str:
    return f"g ({inputs}) => ({output}) {body}"


REFUSED = {
    "a window moves along an axis whose valid elements are not its first ones": one(
        "{ p = MaxPool <kernel_shape = [2], strides = [2]> (x) c = Concat <axis = 2> (x, p) y = Conv(c, v) }",
        "float[1, 2, n] x",
        "float[a, b, c] y",
    ),
    "it takes 3 elements of a free axis, which has 2": one(
        "<int64[1] s = {0}, int64[1] e = {-1}, int64[3] i = {0, 1, 2}> { y = Gather(x, i) }"
    ),
    "Det has no rule": one("{ y = Det(x) }", "float[n, 3, 3] x", "float[a] y"),
    "GridSample combines elements along axis 2 of operand 0 (free: axis 2 of operand 0)": one(
        "{ y = GridSample(x, g) }", "float[1, 2, n, 3] x, float[1, 4, 4, 2] g", "float[a, b, c, d] y"
    ),
    "its shape splits a free axis": one("<int64[2] s = {2, -1}> { y = Reshape(x, s) }"),
    "its weights depend on the size": one("{ y = Conv(u, x) }", "float[1, 4, 9] u, float[n, 4, 3] x", "float[a,b,c] y"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_rule_knows_to_be_right_is_refused(reason: str) -> None:
    source = model(REFUSED[reason], w=weight(2, 4), v=weight(4, 2, 3))
    with pytest.raises(UnsupportedError, match=re.escape(reason.partition(": ")[0])) as error:
        masked_model(source, {"n": (range(2, 12),)})
    assert "option --shape n=2.." in str(error.value)
    assert "separated by commas" in str(error.value)


def test_each_kind_of_primitive_has_a_rule_or_none() -> None:
    from korch.primitive.ops import OPS
    from korch.ranges.free import rule_of

    without = {op.name for op in OPS.values() if rule_of(op.name, op.category) is None}
    without_rule = {name for name in OPS if "winograd" in name or "stored" in name or "gathered" in name}
    assert without <= without_rule
    assert all(OPS[name].category is not Category.ELEMENTWISE for name in without)


DEQUANTIZED = """
g (uint8[1, 2, n] q) => (float[1, 3, n] y)
<float s = {0.5}, uint8 z = {7}>
{
    x = DequantizeLinear(q, s, z)
    y = Conv <pads = [1, 1]> (x, w)
}
"""


def test_bytes_are_masked_before_they_are_dequantized() -> None:
    """So products of bytes stay: what lies behind the elements is the zero point."""
    source, shapes = model(DEQUANTIZED, w=weight(3, 2, 3)), {"n": (range(3, 12),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(3, 12)) < EXACT
    chosen = [p for p in whole.graph.primitives if p.op == "where"]
    assert [str(whole.graph.types[p.output]) for p in chosen] == ["u8[1,2,11]"]
    assert [whole.graph.number(p.inputs[2]) for p in chosen] == [7]


def test_small_ranges_of_two_dimensions() -> None:
    """Each dimension changes in a sample of its own, also where ranges are equal, and where 2 is the largest size."""
    for batch, length in ((3, 3), (2, 5), (2, 2), (4, 4)):
        shapes = {"batch": (range(1, batch + 1),), "length": (range(1, length + 1),)}
        whole = masked_model(bert(), shapes)
        for sizes in itertools.product(range(1, batch + 1), range(1, length + 1)):
            assert worst_error(bert(), shapes, whole, sizes) < EXACT


def test_axes_that_are_masked_at_one_place_share_a_mask() -> None:
    """So images of two free axes have as many steps as those of one."""
    shapes = {"height": (range(5, 14),), "width": (range(9, 12),)}
    whole = masked_model(conv_net(), shapes)
    masks = [hidden for hidden in whole.plan.hidden if hidden.kind == "mask"]
    assert masks and all(list(hidden.axes) == [2, 3] and min(hidden.shape[2:]) > 1 for hidden in masks)
    (first, *_) = masks
    valid = first.array((6, 10))[0, 0]
    height, width = (factors[0].at((6, 10)) for factors in first.axes.values())
    assert valid[:height, :width].all() and valid.sum() == height * width


def test_elements_that_are_taken_may_leave_out_the_first_one() -> None:
    source = model("g (float[n, 4] x) => (float[n, 2] y) <int64[2] i = {2, 1}> { y = Gather <axis = 1> (x, i) }")
    shapes = {"n": (range(1, 9),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(1, 9)) == 0


@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        (range(4, 9), (1, -2, 3)),  # 1 or 2 elements: the sizes that are compared fit several functions
        (range(4, 31), (1, -2, 3)),
        (range(4, 9), (-3, 99, 3)),
        (range(3, 9), (0, -2, 1)),
        (range(1, 7), (0, -2, 1)),  # none at size 1
        (range(1, 7), (-2, 99, 2)),  # the first element instead of the last but one at size 1
        (range(1, 7), (-1, 1, 1)),  # one at size 1, none at others
    ],
)
def test_a_slice_of_a_free_axis_is_right_at_all_sizes_or_refused(sizes: range, bounds: tuple[int, int, int]) -> None:
    numbers = ", ".join(f"int64[1] {name} = {{{n}}}" for name, n in zip("abc", bounds, strict=True))
    text = f"g (float[n, 2] x) => (float[k, 2] y) <{numbers}, int64[1] zero = {{0}}> {{ y = Slice(x, a, b, zero, c) }}"
    source, shapes = model(text), {"n": (sizes,)}
    if sizes[0] == 1:
        with pytest.raises(UnsupportedError, match=r"at the smallest size|that the smallest size has"):
            masked_model(source, shapes)
        return
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in sizes) == 0


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Min(s, c)",
        "m = Min(s, c) y = Div(c, m)",
        "b = Less(s, c) y = Where(b, s, c)",
        "b = Less(s, c) y = Not(b)",
        "m = Min(s, c) f = Cast <to = 1> (m) y = Mul(x, f)",
        "d = Div(c, s) y = Min(d, one)",
        "m = Min(s, c) y = ConstantOfShape(m)",
        "m = Min(s, c) q = Squeeze(m) y = Range(zero, q, step)",
    ],
)
def test_numbers_that_differ_at_the_smallest_size_only_are_refused(nodes: str) -> None:
    known = "int64[1] c = {2}, int64[1] one = {1}, int64 zero = {0}, int64 step = {1}"
    kind = "float[n]" if "Mul" in nodes else "float[k]" if "OfShape" in nodes else "bool[1]" if "Not" in nodes else ""
    result = kind or ("int64[k]" if "Range" in nodes else "int64[1]")
    source = model(f"g (float[n] x) => ({result} y) <{known}> {{ s = Shape(x) {nodes} }}")
    with pytest.raises(UnsupportedError, match=r"depend|no dimension explains|at the smallest size"):
        masked_model(source, {"n": (range(1, 17),)})


@pytest.mark.parametrize(
    "nodes",
    [
        "b = Equal(s, c) y = Not(b)",
        "e = Constant <value_ints = [NUMBER]> () b = Equal(s, e) y = Not(b)",
        "b = Equal(s, c) f = Cast <to = 7> (b) y = Greater(f, zero)",
        "b = Equal(s, c) w = Where(b, c, zero) y = Equal(w, zero)",
        "m = Max(s, c) t = Min(m, d) u = Sub(t, s) y = Equal(u, zero)",
    ],
)
@pytest.mark.parametrize("number", range(2, 15))
def test_numbers_that_differ_at_one_size_are_refused(nodes: str, number: int) -> None:
    known = f"int64[1] c = {{{number}}}, int64[1] d = {{{number + 1}}}, int64[1] zero = {{0}}"
    source = model(f"g (float[n] x) => (bool[1] y) <{known}> {{ s = Shape(x) {nodes.replace('NUMBER', str(number))} }}")
    with pytest.raises(UnsupportedError, match=r"depend|no dimension explains|other primitives"):
        masked_model(source, {"n": (range(1, 17),)})


def test_numbers_that_differ_at_one_pair_of_sizes_are_refused() -> None:
    source = model("g (float[n, m] x) => (bool[2] y) <int64[2] c = {3, 5}> { s = Shape(x) y = Equal(s, c) }")
    with pytest.raises(UnsupportedError, match="depend"):
        masked_model(source, {"n": (range(1, 17),), "m": (range(1, 9),)})


def test_a_number_may_be_zero_at_the_smallest_size() -> None:
    """The number of elements after the first one."""
    nodes = "{ t = Slice(x, one, most) s = Shape(t) f = Cast <to = 1> (s) y = Mul(t, f) }"
    source = model(f"g (float[n] x) => (float[k] y) <int64[1] one = {{1}}, int64[1] most = {{99}}> {nodes}")
    shapes = {"n": (range(1, 17),)}
    whole = masked_model(source, shapes)
    assert max(worst_error(source, shapes, whole, (n,)) for n in range(2, 17)) == 0


@pytest.mark.parametrize("window", ["[2, 2]", "[3, 3], pads = [1, 1, 1, 1]", "[3, 3], ceil_mode = 1"])
@pytest.mark.parametrize("sizes", [range(16, 65), range(16, 65, 4), range(16, 129, 8), range(224, 641, 32)])
def test_windows_of_image_sizes_in_any_steps(window: str, sizes: range) -> None:
    """With even sizes only, a pad of one more column makes no difference, so both numbers of windows are right."""
    text = f"{{ y = MaxPool <kernel_shape = {window}, strides = [2, 2]> (x) }}"
    source, shapes = model(f"g (float[1, 1, h, 16] x) => (float[1, 1, a, b] y) {text}"), {"h": (sizes,)}
    whole = masked_model(source, shapes)
    places = {0, 1, 2, len(sizes) // 2, len(sizes) - 1}
    assert max(worst_error(source, shapes, whole, (sizes[i] // sizes.step,)) for i in places) == 0
