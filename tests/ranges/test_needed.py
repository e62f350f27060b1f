"""The elements of a masked plan's values that are needed, derived backwards from the outputs."""

from dataclasses import replace

import numpy as np

from korch.inputs import random_arrays
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.ops.stored import StoredAttributes
from korch.primitive.types import DType, ValueType
from korch.ranges.form import Extent, Factor, Rows, extent
from korch.ranges.live import count_of, live
from korch.ranges.masked import Masked
from korch.ranges.needed import Need, before_reshape, needs, needs_of_plan
from korch.ranges.plan import RangePlan
from korch.runtime.padding import OutputCut
from tests.ranges.range_models import bert, conv_net, masked_model, model_of, pyramid, vit

N = frozenset((extent(0),))

FLAT = (
    "float[b, n, 6] x | m 6 5",
    "<int64[2] k = {-1, 6}>{ r = Reshape(x, k) p = MatMul(r, m) s = Shape <start = 0, end = 2> (x) "
    "c = Constant <value_ints: ints = [5]> () t = Concat <axis = 0> (s, c) z = Reshape(p, t) "
    "y = Relu(z) }",
)


def found_needs(whole: Masked) -> dict[int, Need]:
    return needs_of_plan(whole.graph, whole.plan, {})


def by_op(graph: PrimitiveGraph, found: dict[int, Need], op: str) -> list[Need]:
    return [found[p.output] for p in graph.primitives if p.op == op]


def test_rows_of_queries_are_needed_and_behind_masks_nothing_is() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 65),)})
    found = found_needs(whole)
    products = by_op(whole.graph, found, "matmul")
    assert products.count({1: N}) == 2  # of queries, keys and values together, and the last one
    assert {2: N, 3: N} in products  # scores, before their mask
    assert by_op(whole.graph, found, "exp") == [{2: N}]  # columns behind the length are zeros that are read
    assert {} in by_op(whole.graph, found, "where")  # masked values are read whole


def test_a_batch_is_needed_everywhere() -> None:
    whole = masked_model(vit(), {"batch": (range(1, 9),)})
    found = found_needs(whole)
    computed = [found[p.output] for p in whole.graph.primitives if whole.graph.types[p.output].shape[:1] == (8,)]
    assert computed and all(need.get(0) == N for need in computed)


def test_of_maps_that_are_joined_the_places_of_a_size_are_needed() -> None:
    whole = masked_model(pyramid(), {"size": (range(4, 33, 4),)})
    half, quarter = frozenset((extent(0, 2),)), N
    convolved = by_op(whole.graph, found_needs(whole), "conv")
    assert convolved.count({2: half, 3: half}) == 2
    assert convolved.count({2: quarter, 3: quarter}) == 2


def test_windows_need_the_rows_that_they_read() -> None:
    """The second convolution reads one row of zeros behind the pooled rows."""
    nodes = """{ a = Conv <pads = [1, 1, 1, 1]> (x, m) b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
    y = Conv <pads = [1, 1, 1, 1]> (b, m) }"""
    whole = masked_model(model_of("float[1, 4, h, 8] x | m 4 4 3 3", nodes), {"h": (range(8, 33, 8),)})
    graph, found = whole.graph, found_needs(whole)
    pooled = frozenset((extent(0, 4),))
    assert by_op(graph, found, "conv") == [{2: frozenset((extent(0, 8),))}, {2: pooled}]
    assert by_op(graph, found, "pool_max") == [{2: pooled}]
    assert by_op(graph, found, "where") == [{2: frozenset((extent(0, 4).then(1),))}]


def test_windows_need_no_more_rows_if_the_size_is_no_multiple_of_them() -> None:
    """Of 2 * floor(n / 4) rows that the second pool reads, at most floor(n / 2) are needed."""
    nodes = """{ a = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) b = Conv <pads = [1, 1, 1, 1]> (a, m)
    c = Relu(b) y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c) }"""
    whole = masked_model(model_of("float[1, 4, h, 8] x | m 4 4 3 3", nodes), {"h": (range(16, 65),)})
    found = found_needs(whole)
    assert by_op(whole.graph, found, "conv") == [{2: frozenset((extent(0, 1, 0, 2),))}]


def test_what_is_not_needed_does_not_reach_the_outputs() -> None:
    """Each value, with NaN where it is not needed, gives the same outputs."""
    for source, shapes in (
        (bert(), {"batch": (1,), "length": (range(1, 17),)}),
        (conv_net(), {"height": (range(5, 14),), "width": (range(9, 12),)}),
        (vit(), {"batch": (range(1, 5),)}),
        (pyramid(), {"size": (range(4, 33, 4),)}),
        (bert(), {"batch": (range(1, 5),), "length": (range(1, 17),)}),
        (model_of(*FLAT), {"b": (range(1, 5),), "n": (range(1, 9),)}),
    ):
        whole = masked_model(source, shapes)
        sizes = tuple(max(1, n - 3) for n in whole.plan.sizes)
        types = {name: whole.graph.types[v] for name, v in whole.graph.inputs}
        feeds = random_arrays({name: (t.shape, t.dtype.numpy) for name, t in types.items()}, 0)
        feeds |= {hidden.name: hidden.array(sizes) for hidden in whole.plan.hidden}
        values = {value: feeds[name] for name, value in whole.graph.inputs}
        plain = {c: constant.array for c, constant in whole.graph.constants.items()} | values
        spoiled, found = dict(plain), found_needs(whole)
        for primitive in whole.graph.primitives:
            for of in (plain, spoiled):
                own = [np.asarray(of[v]) for v in primitive.inputs]
                of[primitive.output] = np.array(primitive.row.reference(own, primitive.attributes))
            result = spoiled[primitive.output]
            if result.dtype.kind == "f":
                result[~needed_mask(result.shape, found.get(primitive.output, {}), sizes)] = np.nan
        for (_, value), form in zip(whole.graph.outputs, whole.plan.outputs, strict=True):
            part = OutputCut.of(form, sizes)
            assert np.array_equal(part.apply(spoiled[value]), part.apply(plain[value]))


def needed_mask(shape: tuple[int, ...], need: Need, sizes: tuple[int, ...]) -> np.ndarray:
    mask = np.ones(shape, bool)
    for axis, count in need.items():
        line = np.zeros(shape[axis], bool)
        for part in count:
            rows = part if isinstance(part, Rows) else Rows(part, Extent(0, 0, 1), 1)
            line.reshape(-1, rows.most)[: rows.outer.at(sizes), : rows.inner.at(sizes)] = True
        mask &= line.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return mask


def test_rows_of_two_dimensions_go_through_reshapes() -> None:
    rows = Rows(extent(0), extent(1), 8)
    both = {0: N, 1: frozenset((extent(1),))}
    merged = {0: frozenset((rows,))}
    assert before_reshape((24, 6), (3, 8, 6), both) == merged
    assert before_reshape((3, 8, 6), (24, 6), merged) == both
    assert before_reshape((3, 8, 1, 6), (24, 6), merged) == both
    assert before_reshape((24, 2, 3), (24, 6), merged) == merged
    assert before_reshape((6, 4, 6), (24, 6), merged) == {0: frozenset((extent(0, 2),))}  # four rows each
    assert before_reshape((144,), (3, 8, 6), both) == {0: frozenset((extent(0, 48),))}
    assert before_reshape((24, 6), (3, 8, 6), {0: N, 1: N}) == {0: frozenset((extent(0, 8),))}
    assert count_of(live(24, (rows,))).at((2, 5)) == rows.at((2, 5)) == 10
    assert count_of(live(24, (rows, extent(0, 9)))).at((2, 5)) == 18  # groups are needed completely


def test_parts_of_joined_axes_are_needed() -> None:
    assert before_reshape((2, 8, 6), (2, 48), {1: frozenset((Extent(0, 6),))}) == {1: N}
    assert before_reshape((2, 48), (2, 8, 6), {1: N}) == {1: frozenset((Extent(0, 6),))}
    assert before_reshape((2, 8, 6), (16, 6), {0: N}) == {0: frozenset((extent(0).then(7, 8),))}
    assert before_reshape((3, 16), (6, 8), {1: N}) == {}
    by_8 = extent(0).rounded(8)
    assert before_reshape((1, 32, 6), (1, 32, 2, 3), {1: frozenset((by_8,))}) == {1: frozenset((by_8,))}
    assert before_reshape((2, 8, 6), (16, 6), {0: frozenset((by_8,))}) == {0: frozenset((extent(0).then(14, 8),))}
    assert [by_8.at((n,)) for n in (0, 1, 8, 9)] == [0, 8, 8, 16] and by_8.repeated(3) == extent(0, 3, 21)


def test_what_nothing_reads_makes_nothing_needed() -> None:
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[8,4]"))
    y = builder.add("exp", [x])
    builder.output("y", builder.add("neg", [y]))
    builder.output("sums", builder.add("reduce_sum", [y], ReduceAttributes((0,))))
    graph = builder.freeze()
    graph = replace(graph, outputs=graph.outputs[:1])
    form = ((Factor(8, extent(0)),), (Factor(4),))
    found = needs_of_plan(graph, RangePlan((8,), (form,), (form,)), {})
    value_of = {primitive.op: primitive.output for primitive in graph.primitives}
    assert found[value_of["exp"]] == {0: N}
    assert value_of["reduce_sum"] not in found


def test_rows_of_products_by_stored_weights_are_needed_in_a_chain() -> None:
    builder, at = GraphBuilder(), StoredAttributes(bits=4, block=4, zero=8)
    values = [builder.input("x", ValueType((1, 8, 4), DType.F32))]
    for _ in range(2):
        weights = builder.constant(np.arange(8, dtype=np.uint8).reshape(2, 4)), builder.constant(np.ones((1, 4), "f4"))
        values.append(builder.add("matmul_stored", [values[-1], *weights], at))
    builder.output("y", values[-1])
    graph = builder.freeze()
    found = needs(graph, [(graph.outputs[0][1], {1: N})])
    assert [found[value] for value in (graph.inputs[0][1], *(p.output for p in graph.primitives))] == [{1: N}] * 3
