"""Enumeration finds exactly the groups that a test of every subset finds, each once, and reports what it omits."""

from dataclasses import replace

import pytest

from korch.ablation import Ablation
from korch.candidate.enumerate import enumerate_groups
from korch.candidate.shape import FUSED, around
from korch.limits import SearchLimits
from korch.options import Options
from korch.primitive.graph import GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.text import parse_graph
from korch.primitive.types import ValueType
from korch.system.deadline import Deadline
from tests.candidate.candidate_oracle import Oracle, small_graph, with_operator

ALL = Options(search=SearchLimits(max_outputs=9, max_inputs=99), ablation=Ablation(attach_chains=False))


def keys(graph, options=ALL):
    groups, report = enumerate_groups(graph, options)
    assert report.groups == len(groups)
    found = [(group.primitives, group.outputs) for group in groups]
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize("kind", ["plain", "linear", "alternatives"])
@pytest.mark.parametrize("most_outputs", [1, 2, 3, 9])
def test_all_subsets(kind, most_outputs):
    for seed in range(15):
        graph = small_graph(seed, 9, kind == "linear", 2 * (kind == "alternatives"))
        options = Options(
            search=SearchLimits(max_outputs=most_outputs, max_primitives=2 + seed % 8, max_inputs=1 + seed % 6),
            ablation=Ablation(attach_chains=False),
        )
        assert keys(graph, options) == Oracle(graph, options).groups(), seed


def test_all_subsets_with_products_alternatives_and_an_operator_of_several_outputs():
    for seed in range(12):
        graph = with_operator(small_graph(seed, 6, linear=True, merges=3), seed)
        options = Options(
            search=SearchLimits(max_outputs=1 + seed % 4, max_primitives=2 + seed % 7, max_inputs=1 + seed % 5),
            ablation=Ablation(attach_chains=False),
        )
        found = keys(graph, options)
        assert found == Oracle(graph, options).groups(), seed
        operator = {p for p, row in enumerate(graph.primitives) if row.op == "opaque"}
        assert tuple(sorted(operator)) in {p for p, _ in found}, "whatever the limits"


def chain(*ops: str, shape: str = "f32[4,6]") -> PrimitiveGraph:
    builder = GraphBuilder()
    value = builder.input("x", ValueType.parse(shape))
    for op in ops:
        value = builder.add(op, [value])
    builder.output("y", value)
    return builder.freeze()


def sets(graph, options=ALL):
    return {primitives for primitives, _ in keys(graph, options)}


def test_a_chain_has_all_of_its_intervals():
    found = sets(chain("neg", "exp", "tanh", "abs"))
    assert found == {tuple(range(a, b)) for a in range(4) for b in range(a + 1, 5)}


def test_a_chain_that_reads_more_than_a_kernel_may_is_cut():
    """As a whole it would be in no group, so that each of its primitives would be a kernel."""
    builder = GraphBuilder()
    inputs = [builder.input(f"x{i}", ValueType.parse("f32[4,6]")) for i in range(12)]
    value = inputs[0]
    for other in inputs[1:]:
        value = builder.add("add", [value, other])
    builder.output("y", value)
    graph = builder.freeze()
    groups, report = enumerate_groups(graph, Options(search=SearchLimits(max_inputs=4)))
    assert {g.primitives for g in groups if len(g.primitives) > 1} == {(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10)}
    assert "max_inputs" in report.limits_hit


def test_contracted_chains_end_only_at_their_end():
    found = sets(chain("neg", "exp", "tanh", "abs"), Options())
    assert found == {(0, 1, 2, 3), (0,), (1,), (2,), (3,)}


def test_long_chains_and_many_diamonds_take_no_longer_than_they_are():
    """Paths through contracted chains are exponentially many, and longer than Python's stack."""
    found = sets(chain(*["tanh"] * 1200), Options())
    assert tuple(range(1200)) in found
    builder = GraphBuilder()
    value = builder.input("x", ValueType.parse("f32[4]"))
    for _ in range(60):
        value = builder.add("mul", [value, builder.add("tanh", [value])])
    for _ in range(60):
        value = builder.add("mul", [value, value])
    builder.output("y", value)
    graph = builder.freeze()
    assert tuple(range(len(graph.primitives))) in sets(graph, Options())


def test_a_chain_after_a_linear_primitive_may_end_anywhere():
    """A library may fuse its beginning only."""
    builder = GraphBuilder()
    x, w = (builder.input(n, ValueType.parse("f32[4,4]")) for n in "xw")
    value = builder.add("matmul", [x, w])
    for op in ("abs", "tanh", "sin"):
        value = builder.add(op, [value])
    builder.output("y", value)
    found = sets(builder.freeze(), Options())
    assert found >= {(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 2, 3), (2, 3)}


def test_a_chain_may_end_before_numbers_are_widened_for_a_product():
    """The product then reads half of the bytes, and matrix units multiply them at once."""
    builder = GraphBuilder()
    value = builder.input("x", ValueType.parse("bf16[4,4]"))
    for op in ("neg", "tanh"):
        value = builder.add(op, [value])
    wide = builder.add("cast", [value], CastAttributes("f32"))
    builder.output("y", builder.add("matmul", [wide, builder.input("w", ValueType.parse("f32[4,4]"))]))
    groups, _ = enumerate_groups(builder.freeze(), Options(), shapes=(FUSED, around("matmul", widens=True)))
    assert {(0, 1), (2, 3)} <= {group.primitives for group in groups}


def test_two_diamonds_from_one_root_are_one_set_of_two_outputs():
    """The set can be grown only by more than one primitive at a time if ends are limited."""
    builder = GraphBuilder()
    root = builder.add("neg", [builder.input("x", ValueType.parse("f32[4]"))])
    for i, (a, b) in enumerate((("exp", "tanh"), ("sin", "cos"))):
        pair = [builder.add(a, [root]), builder.add(b, [root])]
        builder.output(f"y{i}", builder.add("add", pair))
    assert tuple(range(7)) in sets(builder.freeze(), replace(ALL, search=replace(ALL.search, max_outputs=2)))


def test_broadcasts_come_with_their_readers():
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[3,5]"))
    total = builder.add("reduce_sum", [x], ReduceAttributes((1,)))
    wide = builder.add("broadcast", [total], BroadcastAttributes((3, 5)))
    builder.output("y", builder.add("sub", [x, wide]))
    builder.output("z", builder.add("mul", [x, wide]))
    found = sets(builder.freeze())
    assert found == {(0,), (1,), (2,), (3,), (0, 1, 2), (0, 1, 3), (0, 1, 2, 3), (1, 2), (1, 3)}


def test_what_a_path_leaves_and_reenters_is_no_set():
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[4]"))
    a = builder.add("neg", [x])
    builder.output("y", builder.add("add", [a, builder.add("exp", [a])]))
    assert sets(builder.freeze()) == {(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)}


def test_alternatives_of_one_value_never_meet_and_cycles_are_no_sets():
    """a = T(b) and b = T(a) hold at once; a set of both computes nothing."""
    swap = TransposeAttributes((1, 0))
    type_ = ValueType.parse("f32[4,4]")
    graph = PrimitiveGraph(
        types=(type_,) * 4,
        primitives=(
            Primitive("neg", (0,), Primitive("neg", (), swap, 0).row.attributes(), 1),
            Primitive("transpose", (1,), swap, 2),
            Primitive("transpose", (2,), swap, 1),
            Primitive("neg", (2,), Primitive("neg", (), swap, 0).row.attributes(), 3),
        ),
        inputs=(("x", 0),),
        outputs=(("y", 3), ("z", 1)),
    )
    found = keys(graph)
    assert not any({0, 2} <= set(p) or {1, 2} <= set(p) for p, _ in found)
    assert found == Oracle(graph, ALL).groups()
    assert all(outputs for _, outputs in found)


def linear_graph():
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[4,4]"))
    w = builder.input("w", ValueType.parse("f32[4,4]"))
    before = builder.add("transpose", [builder.add("exp", [x])], TransposeAttributes((1, 0)))
    product = builder.add("matmul", [before, w])
    after = builder.add("reduce_sum", [builder.add("tanh", [product])], ReduceAttributes((1,)))
    builder.output("y", builder.add("matmul", [w, after]))
    return builder.freeze()


def test_linear_primitives_take_layout_before_and_no_reduction_beside():
    graph = linear_graph()
    names = [primitive.op for primitive in graph.primitives]
    found = {tuple(names[p] for p in primitives) for primitives in sets(graph)}
    assert found == {
        ("exp",),
        ("transpose",),
        ("matmul",),
        ("tanh",),
        ("reduce_sum",),
        ("exp", "transpose"),
        ("transpose", "matmul"),
        ("transpose", "matmul", "tanh"),
        ("matmul", "tanh"),
        ("tanh", "reduce_sum"),
    }


def test_opaque_primitives_meet_only_the_other_outputs_of_their_operator():
    texts = ("f32[4]", "i64[4]")
    row = OpaqueAttributes("TopK", "", 11, "00", ("f32[4]",), texts, 0)
    type_, index = map(ValueType.parse, texts)
    graph = PrimitiveGraph(
        types=(type_, type_, index, type_, type_),
        primitives=(
            Primitive("opaque", (0,), row, 1),
            Primitive("opaque", (0,), replace(row, output=1), 2),
            Primitive("neg", (1,), Primitive("neg", (), row, 0).row.attributes(), 3),
            Primitive("opaque", (3,), row, 4),
        ),
        inputs=(("x", 0),),
        outputs=(("v", 4), ("i", 2)),
    )
    assert sets(graph) == {(0,), (1,), (2,), (3,), (0, 1)}


def test_limits_are_reported_and_single_primitives_always_there():
    graph = small_graph(3, 9)
    tight = Options(
        search=SearchLimits(max_primitives=2, max_inputs=1, max_outputs=1), ablation=Ablation(attach_chains=False)
    )
    groups, report = enumerate_groups(graph, tight)
    assert set(report.limits_hit) <= {"max_primitives", "max_inputs", "max_outputs"}
    assert {group.primitives for group in groups} >= {(p,) for p in range(len(graph.primitives))}
    builder = GraphBuilder()
    x, y = (builder.input(n, ValueType.parse("f32[4]")) for n in "xy")
    a = builder.add("neg", [builder.add("add", [x, y])])
    builder.output("o", a)
    builder.output("p", builder.add("exp", [a]))
    graph = builder.freeze()
    for name, value in (("max_primitives", 2), ("max_inputs", 1), ("max_outputs", 1), ("max_candidates", 3)):
        wide = Options(search=SearchLimits(max_outputs=2), ablation=Ablation(attach_chains=False))
        assert enumerate_groups(graph, wide)[1].limits_hit == ()
        groups, report = enumerate_groups(graph, replace(wide, search=replace(wide.search, **{name: value})))
        assert report.limits_hit == ((name,) if name != "max_outputs" else report.limits_hit)
        assert {p for g in groups for p in g.primitives} == {0, 1, 2}


def test_too_many_groups_are_not_made():
    graph = small_graph(5, 9, linear=True)
    groups, report = enumerate_groups(graph, Options())
    assert enumerate_groups(graph, Options(), len(groups)) == (groups, report)
    for most in (3, len(groups) - 1):
        none, few = enumerate_groups(graph, Options(), most)
        assert none == ()
        assert few.groups > most


def test_the_order_is_deterministic():
    graph = small_graph(5, 9, linear=True)
    first, second = (enumerate_groups(graph, Options())[0] for _ in range(2))
    assert [(g.primitives, g.outputs, g.key) for g in first] == [(g.primitives, g.outputs, g.key) for g in second]


def test_convolutions_of_two_layers_never_share_a_kernel():
    builder = GraphBuilder()
    value = builder.input("x", ValueType.parse("f32[1,2,5,5]"))
    for i in range(2):
        w = builder.input(f"w{i}", ValueType.parse("f32[2,2,1,1]"))
        attributes = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1))
        value = builder.add("abs", [builder.add("conv", [value, w], attributes)])
    builder.output("y", value)
    graph = builder.freeze()
    for primitives in sets(graph):
        assert sum(graph.primitives[p].op == "conv" for p in primitives) <= 1


def test_a_cycle_of_layout_alternatives_is_no_group() -> None:
    graph = parse_graph(
        'graph(%0 "x": f32[2,3]) -> (%4 "y")\n'
        "%1: f32[2,3] = exp(%0)\n"
        "%2: f32[3,2] = transpose(%1) {perm=(1, 0)}\n"
        "   | reshape(%3) {shape=(3, 2)}\n"
        "%3: f32[3,1,2] = reshape(%2) {shape=(3, 1, 2)}\n"
        "%4: f32[3,2] = neg(%2)\n"
    )
    groups, _ = enumerate_groups(graph, Options())
    reshapes = {i for i, p in enumerate(graph.primitives) if p.op == "reshape"}
    assert len(groups) >= 5
    assert not any(reshapes <= set(group.primitives) for group in groups)


def test_a_deadline_leaves_single_primitives_and_says_so():
    graph = chain("exp", "neg", "abs")
    groups, report = enumerate_groups(graph, ALL, deadline=Deadline(0))
    assert {group.primitives for group in groups} == {(0,), (1,), (2,)}
    assert report.limits_hit == ("budget",)


def test_a_deadline_leaves_products_that_widen_their_operands():
    g = GraphBuilder()
    x, w = (g.input(name, ValueType.parse(text)) for name, text in (("x", "f32[1,4]"), ("w", "bf16[4,6]")))
    y = g.add("matmul", [x, g.add("cast", [w], CastAttributes("f32"))])
    g.output("y", g.add("exp", [y]))
    groups, report = enumerate_groups(g.freeze(), ALL, deadline=Deadline(0), shapes=(around("matmul", widens=True),))
    assert {group.primitives for group in groups} == {(0,), (1,), (2,), (0, 1)}
    assert ((0, 1), (y,)) in report.needed
