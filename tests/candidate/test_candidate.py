"""Groups: their canonical body, key, ports and bytes."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

from korch.candidate.candidate import Candidate, Offer, make_group, make_layout_change
from korch.candidate.enumerate import enumerate_groups
from korch.candidate.layout import Layout, channels_last
from korch.options import Options
from korch.primitive import reference
from korch.primitive.check import check_graph
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import SliceAttributes, TakeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.ops.reduce import PoolAttributes
from korch.primitive.types import ValueType
from korch.testing.samples import random_inputs
from tests.candidate.candidate_oracle import small_graph

POINT = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1))


def blocks(repeats=3, seeds=(1, 2, 3), number=2.0):
    """Return a model that repeats one block with weights of its own."""
    builder = GraphBuilder()
    value = builder.input("x", ValueType.parse("f32[1,4,5,5]"))
    for i in range(repeats):
        w = np.random.default_rng(seeds[i]).standard_normal((4, 4, 1, 1)).astype(np.float32)
        value = builder.add("conv", [value, builder.constant(w)], POINT)
        shape = builder.type(value).shape
        two = builder.constant(np.broadcast_to(np.float32(number), shape))
        value = builder.add("mul", [builder.add("tanh", [value]), two])
    builder.output("y", value)
    return builder.freeze()


def test_equal_blocks_have_equal_keys():
    graph = blocks()
    groups = [make_group(graph, range(3 * i, 3 * i + 3), [graph.primitives[3 * i + 2].output]) for i in range(3)]
    assert len({group.key for group in groups}) == 1
    assert len({group.inputs for group in groups}) == 3
    assert groups[0].text.startswith("# constant i1\ngraph(")
    other = blocks(number=3.0)
    changed = make_group(other, range(3), [other.primitives[2].output])
    assert changed.key != groups[0].key


def test_numbers_in_the_model_do_not_matter():
    """The same block after other values, with its inputs declared the other way round."""
    keys = set()
    for names in ("xy", "yx"):
        builder = GraphBuilder()
        inputs = {name: builder.input(name, ValueType.parse("f32[4]")) for name in names}
        if names == "yx":
            builder.output("z", builder.add("exp", [inputs["x"]]))
        value = builder.add("sub", [builder.add("neg", [inputs["x"]]), inputs["y"]])
        builder.output("o", value)
        graph = builder.freeze()
        chosen = [p for p, q in enumerate(graph.primitives) if q.op in ("neg", "sub")]
        keys.add(make_group(graph, chosen, [dict(graph.outputs)["o"]]).key)
    assert len(keys) == 1


def test_the_order_of_outputs_and_what_is_constant_matter():
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[4]"))
    a = builder.add("neg", [x])
    b = builder.add("exp", [a])
    builder.output("a", a)
    builder.output("b", b)
    graph = builder.freeze()
    found = dict(graph.outputs)
    assert make_group(graph, (0, 1), [found["a"], found["b"]]).key != (make_group(graph, (0, 1), [found["b"]]).key)
    builder = GraphBuilder()
    c = builder.constant(np.arange(4, dtype=np.float32))
    y = builder.input("y", ValueType.parse("f32[4]"))
    builder.output("o", builder.add("add", [y, c]))
    graph = builder.freeze()
    group = make_group(graph, (0,), [graph.outputs[0][1]])
    assert group.constant_inputs == frozenset({1})
    plain = GraphBuilder()
    y, z = (plain.input(n, ValueType.parse("f32[4]")) for n in "yz")
    plain.output("o", plain.add("add", [y, z]))
    other = plain.freeze()
    assert make_group(other, (0,), [other.outputs[0][1]]).key != group.key


def test_bodies_are_sound_and_mean_what_the_model_means():
    for seed in range(10):
        graph = small_graph(seed, 9, linear=True)
        rng = np.random.default_rng(seed)
        everything = replace(graph, outputs=tuple((str(v), v) for v in range(len(graph.types))))
        values = {int(name): array for name, array in reference.run(everything, random_inputs(graph, rng)).items()}
        for group in enumerate_groups(graph, Options())[0]:
            check_graph(group.body)
            assert len(group.body.primitives) == len(group.primitives)
            feeds = {f"i{i}": values[v] for i, v in enumerate(group.inputs)}
            found = reference.run(group.body, feeds)
            for i, value in enumerate(group.outputs):
                np.testing.assert_allclose(found[f"o{i}"], values[value], rtol=1e-9, atol=1e-9)


def candidate(group, inputs=None, outputs=None, **fields):
    plain = [Layout.plain(t.rank) for t in (*group.input_types, *group.output_types)]
    n = len(group.inputs)
    return Candidate(group, "toy", Offer(inputs or tuple(plain[:n]), outputs or tuple(plain[n:])), **fields)


def test_keys_of_candidates_differ_in_all_that_their_kernels_depend_on():
    graph = blocks()
    group = make_group(graph, range(3), [graph.primitives[2].output])
    plain = candidate(group)
    last = channels_last(4)
    others = [
        candidate(group, version="2"),
        candidate(group, outputs=(last,)),
        candidate(group, inputs=(last, Layout.plain(4))),
        Candidate(group, "other", plain.offer),
        Candidate(group, "toy", Offer(plain.offer.inputs, plain.offer.outputs, "keep")),
    ]
    assert len({c.key for c in (plain, *others)}) == 6
    assert plain.input_ports == ((group.inputs[0], Layout.plain(4)),)
    assert plain.output_ports == ((group.outputs[0], Layout.plain(4)),)
    assert plain.linear_flop == 2 * 4 * 4 * 25
    assert str(plain) == f"{plain.key[:8]} toy [conv tanh mul] (abcd, abcd) -> (abcd)"


def test_bytes():
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[10,8]"))
    part = builder.add("slice", [x], SliceAttributes((2, 0), (3, 8), (1, 1)))
    rows = builder.add("take", [builder.input("y", ValueType.parse("f32[10,8]"))], TakeAttributes(0, (1, 1, 4)))
    builder.output("o", builder.add("add", [part, rows]))
    graph = builder.freeze()
    found = candidate(make_group(graph, range(3), [graph.outputs[0][1]]))
    assert found.size_bytes == 4 * (80 + 80 + 24)
    assert found.read_bytes == 4 * (24 + 16)
    assert found.write_bytes == 4 * 24


def test_a_change_of_layout_is_a_group_of_its_own():
    graph = blocks(1)
    change = make_layout_change(graph, 0)
    assert change.is_layout_change and change.inputs == change.outputs == (0,)
    assert not make_group(graph, [0], [graph.primitives[0].output]).is_layout_change
    assert str(candidate(change)).endswith("toy [layout change] (abcd) -> (abcd)")


def test_small_constants_of_an_opaque_operator_are_part_of_its_body():
    """They may be sizes, on which no kernel could be measured without their elements."""
    node = onnx.helper.make_node("Col2Im", ["x0", "x1", "x2"], ["y0"]).SerializeToString()
    texts = ("f32[1,12,4]", "i64[2]", "i64[2]")
    attributes = OpaqueAttributes("Col2Im", "", 18, node.hex(), texts, ("f32[1,2,4,6]",), 0)
    found = []
    for size in (6, 9):
        builder = GraphBuilder()
        x = builder.input("x", ValueType.parse(texts[0]))
        sizes = [builder.constant(np.array(n, np.int64)) for n in ((4, size), (2, 3))]
        builder.output("y", builder.add("opaque", [x, *sizes], attributes))
        graph = builder.freeze()
        found.append(make_group(graph, (0,), [graph.outputs[0][1]]))
    assert [len(group.inputs) for group in found] == [1, 1]
    assert found[0].key != found[1].key
    plain = GraphBuilder()
    x = plain.input("x", ValueType.parse("f32[2]"))
    two = plain.constant(np.array([1.0, 2.0], np.float32))
    plain.output("y", plain.add("add", [x, two]))
    graph = plain.freeze()
    assert make_group(graph, (0,), [graph.outputs[0][1]]).constant_inputs == frozenset({1})


@pytest.mark.parametrize(
    ("window", "stride", "dilation", "share"),
    [(1, 1, 1, 1.0), (3, 2, 1, 1.0), (1, 2, 1, 0.25), (2, 3, 1, 4 / 9), (3, 2, 2, 0.25)],
)
def test_a_bound_counts_no_elements_between_windows(window, stride, dilation, share):
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[1,4,36,36]"))
    rng = np.random.default_rng(0)
    w = builder.constant(rng.standard_normal((8, 4, window, window)).astype(np.float32))
    two = (0, 0)
    conv = ConvAttributes((stride,) * 2, two, two, (dilation,) * 2)
    pool = PoolAttributes((window,) * 2, (stride,) * 2, two, two, (dilation,) * 2)
    y, z = builder.add("conv", [x, w], conv), builder.add("pool_max", [x], pool)
    builder.output("y", y)
    builder.output("z", z)
    graph = builder.freeze()
    image, weights = 4 * 4 * 36 * 36, 4 * 8 * 4 * window**2
    for value, more in ((y, weights), (z, 0)):
        group = make_group(graph, graph.producers[value], [value])
        plain = tuple(Layout.plain(t.rank) for t in group.input_types)
        found = Candidate(group, "hand", Offer(plain, (Layout.plain(4),)))
        assert found.read_bytes == round(share * image) + more


def test_of_a_slice_of_a_slice_the_second_is_read():
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[64,8]"))
    part = builder.add("slice", [x], SliceAttributes((0, 0), (32, 8), (1, 1)))
    y = builder.add("exp", [builder.add("slice", [part], SliceAttributes((0, 0), (4, 8), (1, 1)))])
    builder.output("y", y)
    graph = builder.freeze()
    group = make_group(graph, range(len(graph.primitives)), [y])
    plain = Layout.plain(2)
    assert Candidate(group, "hand", Offer((plain,), (plain,))).read_bytes == 4 * 8 * 4
