"""Layouts: packing is a bijection, and parsing the printed form gives the same layout."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from korch.candidate.layout import Layout, channels_blocked, channels_last, layout_choices, split_float32
from korch.primitive.types import DType, ValueType


@st.composite
def layouts(draw):
    rank = draw(st.integers(0, 5))
    order = tuple(draw(st.permutations(range(rank))))
    blocks = st.tuples(st.integers(0, max(rank - 1, 0)), st.sampled_from((2, 3, 4, 8)))
    return Layout(order, tuple(draw(st.lists(blocks, max_size=3))) if rank else ())


@st.composite
def split_layouts(draw):
    layout = draw(layouts())
    return Layout(layout.order, layout.blocks, draw(st.booleans()))


@st.composite
def layouts_and_shapes(draw):
    layout = draw(layouts())
    return layout, tuple(draw(st.integers(0 if i else 1, 5)) for i in range(len(layout.order)))


@settings(max_examples=200, deadline=None)
@given(layouts_and_shapes())
def test_unpacking_undoes_packing(pair):
    layout, shape = pair
    array = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
    packed = layout.pack(array)
    assert packed.shape == layout.physical_shape(shape)
    assert packed.flags.c_contiguous
    assert packed.nbytes == layout.size_bytes(ValueType(shape, DType.I32))
    assert sorted(packed[packed != 0].tolist()) == array.reshape(-1).tolist()
    unpacked = layout.unpack(packed, shape)
    assert unpacked.dtype == array.dtype
    np.testing.assert_array_equal(unpacked, array)


@settings(max_examples=100, deadline=None)
@given(layouts_and_shapes())
def test_components_add_up_to_the_numbers(pair):
    whole, shape = pair
    layout = Layout(whole.order, whole.blocks, is_split=True)
    rng = np.random.default_rng(math.prod(shape))
    array = (rng.standard_normal(shape) * 10.0 ** rng.integers(-20, 20)).astype(np.float32)
    array = array.reshape(shape)
    packed = layout.pack(array)
    assert packed.dtype == DType.BF16.numpy
    assert ValueType(packed.shape, DType.BF16) == layout.stored_type(ValueType(shape, DType.F32))
    assert packed.nbytes == layout.size_bytes(ValueType(shape, DType.F32))
    np.testing.assert_array_equal(layout.unpack(packed, shape), array)
    first = np.moveaxis(packed.reshape(layout.physical_shape(shape)), len(whole.order), 0)[0]
    near = whole.pack(array)
    assert (np.abs(first.astype(np.float32) - near) <= np.abs(near) * 2.0**-8).all()


def test_what_is_not_finite_is_a_component():
    most = np.finfo(np.float32).max
    array = np.array([np.inf, -np.inf, np.nan, most, -most, 0.0, -0.0], np.float32)
    first, second, third = (component.astype(np.float32) for component in split_float32(array))
    np.testing.assert_array_equal(first + (second + third), array)
    assert np.isfinite(first[3:]).all()
    assert not second[:3].any()


@settings(max_examples=200, deadline=None)
@given(layouts_and_shapes())
def test_normalizing_keeps_the_bytes(pair):
    layout, shape = pair
    found = layout.normalized(shape)
    assert found in (layout, Layout.plain(len(shape)))
    if math.prod(shape):
        array = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
        packed, plain = layout.pack(array), np.ascontiguousarray(array)
        assert found.pack(array).tobytes() == packed.tobytes()
        assert found.is_plain == (packed.tobytes() == plain.tobytes()) or layout.is_plain


@settings(max_examples=300, deadline=None)
@given(layouts_and_shapes(), st.data())
def test_parts_lie_end_to_end_exactly_where_that_is_said(pair, data):
    layout, shape = pair
    if not shape:
        return
    axis = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))
    shapes = [(*shape[:axis], n, *shape[axis + 1 :]) for n in sizes]
    count = sum(map(math.prod, shapes))
    whole = np.arange(1, count + 1).reshape(*shape[:axis], sum(sizes), *shape[axis + 1 :])
    parts = np.split(whole, np.cumsum(sizes)[:-1], axis)
    packed = np.concatenate([layout.pack(part).reshape(-1) for part in parts])
    is_so = np.array_equal(layout.pack(whole).reshape(-1), packed)
    assert layout.lays_end_to_end(shapes, axis) <= is_so
    if layout.block(axis) == 1 and count:  # else pads in the midst may lie as those at the end
        assert layout.lays_end_to_end(shapes, axis) == is_so


@settings(max_examples=200, deadline=None)
@given(split_layouts())
def test_the_text_form_comes_back(layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout.plain(4), "abcd"),
        (channels_last(4), "acdb"),
        (channels_last(5), "acdeb"),
        (channels_blocked(4, 16), "aBcd16b"),
        (Layout.plain(0), ""),
        (Layout((0, 1, 2, 3), ((1, 4), (0, 16), (1, 4))), "ABcd4b16a4b"),
        (Layout((1, 0), ((1, 32), (0, 2)), is_split=True), "BA32b2a*3"),
    ],
)
def test_known_texts(layout, text):
    assert str(layout) == text
    assert Layout.parse(text) == layout


@pytest.mark.parametrize(
    "text",
    [
        "acb d",
        "abd",
        "aab",
        "aBcd",
        "abcd16b",
        "ab4d",
        "aB0b",
        "aB04b",
        "16b",
        "abcd16",
        "any",
        "a-b",
        "ab*2",
        "ab*3*3",
    ],
)
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(ValueError, match="is no layout; expected one like abcd or aBcd16b"):
        Layout.parse(text)


def test_blocks_nest_from_outside_in():
    x = np.arange(8)
    np.testing.assert_array_equal(Layout.parse("A4a").pack(x), [[0, 1, 2, 3], [4, 5, 6, 7]])
    y = np.arange(16).reshape(4, 4)
    packed = Layout.parse("AB2a2b").pack(y)
    np.testing.assert_array_equal(packed[0, 1], [[2, 3], [6, 7]])
    np.testing.assert_array_equal(packed[1, 0], [[8, 9], [12, 13]])


def test_what_is_missing_from_a_block_is_zero():
    packed = Layout.parse("A4a").pack(np.arange(1, 6, dtype=np.float32))
    np.testing.assert_array_equal(packed, [[1, 2, 3, 4], [5, 0, 0, 0]])


@pytest.mark.parametrize(
    ("shape", "texts"),
    [
        ((1, 32, 4, 5), ["abcd", "acdb", "aBcd16b"]),
        ((1, 24, 4, 5), ["abcd", "acdb"]),
        ((1, 16, 4, 5), ["abcd", "acdb", "aBcd16b"]),
        ((2, 1, 4, 5), ["abcd"]),
        ((2, 32, 1, 1), ["abcd"]),
        ((1, 32, 2, 4, 5), ["abcde", "acdeb", "aBcde16b"]),
        ((32, 32), ["ab"]),
        ((1, 32, 5), ["abc"]),
        ((0, 32, 4, 5), ["abcd"]),
        ((), [""]),
        ((1, 32, 1, 1, 1, 1), ["abcdef"]),
    ],
)
def test_choices(shape, texts):
    assert [str(x) for x in layout_choices(ValueType(shape, DType.F32), 16)] == texts
