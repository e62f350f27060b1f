"""Exact plans: the counterparts of a plan's values and primitives in the graph for another size."""

import numpy as np

from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import SliceAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import DType, ValueType
from korch.ranges.binding import dimensions_of
from korch.ranges.counterpart import counterparts
from korch.ranges.exact import all_sizes, count_sizes, exact_plans, has_free_windows
from korch.ranges.form import Dimension
from korch.ranges.samples import sample
from korch.runtime.padding import size_at
from tests.ranges.range_models import bert, primitives, pyramid, vit


def graph(size: int, *, is_reversed: bool = False) -> PrimitiveGraph:
    """Two parts of an input, each with a factor of its own; the factors are numbered in either order."""
    builder = GraphBuilder()
    x = builder.input("x", ValueType((2 * size, 2), DType.F32))
    rows = {n: builder.constant(np.full((1, 2), n, np.float32)) for n in ((5, 3) if is_reversed else (3, 5))}
    wide = {n: builder.add("broadcast", (row,), BroadcastAttributes((size, 2))) for n, row in rows.items()}
    parts = [builder.add("slice", (x,), SliceAttributes((start, 0), (size, 2), (1, 1))) for start in (0, size)]
    first, second = (builder.add("mul", (part, wide[n])) for part, n in zip(parts, (3, 5), strict=True))
    builder.output("y", builder.add("sub", (first, second)))
    return builder.freeze()


def test_counterparts_do_not_depend_on_the_order_of_constants() -> None:
    one, other = graph(4), graph(7, is_reversed=True)
    found = counterparts(one, other)
    assert found.primitives.keys() == set(range(len(one.primitives)))
    assert sorted(found.primitives.values()) == list(range(len(other.primitives)))
    assert found.values[one.outputs[0][1]] == other.outputs[0][1]
    for number, same in found.primitives.items():
        first, second = one.primitives[number], other.primitives[same]
        assert first.op == second.op and found.values[first.output] == second.output
        assert tuple(found.values[value] for value in first.inputs) == second.inputs
    for value, constant in one.constants.items():
        assert np.array_equal(constant.array[0], other.constants[found.values[value]].array[0])


def test_what_another_graph_lacks_has_no_counterpart() -> None:
    builder = GraphBuilder()
    x = builder.input("x", ValueType((8, 2), DType.F32))
    builder.output("y", builder.add("sigmoid", (x,)))
    found = counterparts(graph(4), builder.freeze())
    assert not found.primitives and found.values == {0: 0}


def test_counterparts_of_models_are_complete() -> None:
    shapes = {"size": (range(8, 41, 4),)}
    one, other = (primitives(pyramid(), shapes, (n,)) for n in (4, 9))
    found = counterparts(one, other)
    assert len(found.primitives) == len(one.primitives) == len(other.primitives)
    assert [found.values[value] for _, value in one.outputs] == [value for _, value in other.outputs]


def test_sizes_begin_in_the_middle() -> None:
    dimensions = (Dimension("a", None, 2, 6), Dimension("b", None, 1, 1))
    assert all_sizes(dimensions) == [(4, 1), (3, 1), (5, 1), (2, 1), (6, 1)]
    assert count_sizes(dimensions) == 5


def test_windows_along_free_axes_are_found() -> None:
    def has_windows(source: bytes, shapes: dict[str, tuple[int | range, ...]]) -> bool:
        dimensions = dimensions_of(shapes)
        return has_free_windows(
            sample(dimensions, tuple(d.high for d in dimensions), lambda sizes: primitives(source, shapes, sizes))
        )

    assert has_windows(pyramid(), {"size": (range(8, 41, 4),)})
    assert not has_windows(vit(), {"batch": (range(1, 9),)})  # its windows are of images of one size
    assert not has_windows(bert(), {"batch": (1,), "length": (range(1, 17),)})


def test_exact_plans_read_sizes_from_their_inputs() -> None:
    shapes = {"size": (range(8, 41, 4),)}
    dimensions = dimensions_of(shapes)
    samples = sample(dimensions, (10,), lambda sizes: primitives(pyramid(), shapes, sizes))
    (plan,) = exact_plans(samples, [(3,)])
    assert plan.is_exact and plan.serves((3,)) and not plan.serves((2,)) and not plan.serves((4,))
    (form,) = plan.inputs
    assert [size_at(axis, (3,)) for axis in form] == [1, 3, 12, 12]
