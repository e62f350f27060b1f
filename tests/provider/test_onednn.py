"""The offers and refusals of oneDNN: each refusal has an input that causes it."""

import re
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal, make_layout_change
from korch.candidate.layout import Layout
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import PadAttributes, ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import ValueType
from korch.provider.onednn import OneDnnProvider
from korch.provider.onednn.call import Eltwise, LibraryAnswer
from korch.provider.onednn.geometry import model_layout
from korch.provider.onednn.match import OneDnnOp, match_group
from korch.system.extras import install_command
from korch.testing.kernels import run_kernel
from tests.provider.onednn_groups import Graph, conv_group, matmul_group, pool_group

ONE = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1))
SAME = (1, 1, 1, 1)


@pytest.fixture(scope="module")
def provider():
    try:
        return OneDnnProvider(propagate_nan=False)
    except ImportError as error:
        pytest.skip(str(error))


def reason(group: Group, propagate_nan: bool = False) -> str:
    found = match_group(group, propagate_nan)
    assert isinstance(found, Refusal), found
    return found.reason


def conv_with(chain) -> Group:
    return conv_group((1, 8, 6, 6), (8, 8, 3, 3), chain=chain)


def test_refuses_two_outputs():
    g = Graph()
    y = g.add("conv", [g.tensor(1, 8, 6, 6), g.weights(8, 8, 1, 1)], ONE)
    assert reason(g.group(y, g.with_number("max", y, 0.0))) == "oneDNN primitives have one output"


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
def test_refuses_other_types(dtype):
    g = Graph()
    x = g.input("x", ValueType.parse(f"{dtype}[4,4]"))
    y = g.input("y", ValueType.parse(f"{dtype}[4,4]"))
    assert reason(g.group(g.add("matmul", [x, y]))) == "only float32 is offered"


def test_refuses_an_output_of_another_type():
    chain = conv_with(lambda g, y: g.add("cast", [y], CastAttributes("i32")))
    assert reason(chain) == "only float32 is offered"


def test_refuses_empty_tensors():
    assert reason(matmul_group((0, 4), (4, 4))) == "a tensor is empty"


def test_refuses_none_and_two_hearts():
    g = Graph()
    expected = "there is not one convolution, matrix product or pooling"
    assert reason(g.group(g.add("abs", [g.tensor(4, 4)]))) == expected
    both = conv_with(lambda g, y: g.add("conv", [y, g.weights(8, 8, 1, 1)], ONE))
    assert reason(both) == expected


@pytest.mark.parametrize(
    "pad",
    [
        PadAttributes((0, 0, 1, 1), (0, 0, 1, 1), "reflect"),
        PadAttributes((0, 0, 1, 1), (0, 0, 1, 1), "edge"),
        PadAttributes((0, 0, 1, 1), (0, 0, 1, 1), "constant", 1.0),
        PadAttributes((0, 1, 0, 0), (0, 1, 0, 0)),
        PadAttributes((1, 0, 0, 0), (0, 0, 0, 0)),
    ],
)
def test_refuses_pads_that_are_no_zeros_around_the_image(pad):
    channels = 8 - pad.before[1] - pad.after[1]
    group = conv_group((1, channels, 6, 6), (8, 8, 3, 3), pad=pad)
    assert reason(group) == "the pad before it is not of zeros on spatial axes only"


def test_refuses_a_pad_of_the_weights_and_before_a_transposed_convolution():
    g = Graph()
    w = g.add("pad", [g.tensor(8, 8, 1, 1)], PadAttributes((0, 0, 1, 1), (0, 0, 1, 1)))
    y = g.add("conv", [g.tensor(1, 8, 6, 6), w], ONE)
    assert reason(g.group(y)) == "the pad before it is not of zeros on spatial axes only"
    pad = PadAttributes((0, 0, 1, 1), (0, 0, 1, 1))
    group = conv_group((1, 8, 6, 6), (8, 8, 3, 3), pad=pad, transposed=True)
    assert reason(group) == "the pad before it is not of zeros on spatial axes only"


def test_refuses_a_pad_that_is_read_elsewhere_too():
    g = Graph()
    x = g.add("pad", [g.tensor(1, 8, 4, 4)], PadAttributes((0, 0, 1, 1), (0, 0, 1, 1)))
    y = g.add("conv", [x, g.weights(8, 8, 1, 1)], ONE)
    assert reason(g.group(g.add("add", [y, x]))) == "the pad before it is read elsewhere too"


def test_refuses_moves_that_are_no_view():
    g = Graph()
    turned = g.add("transpose", [g.tensor(4, 6)], TransposeAttributes((1, 0)))
    left = g.add("reshape", [turned], ReshapeAttributes((4, 6)))
    group = g.group(g.add("matmul", [left, g.tensor(6, 5)]))
    assert reason(group) == "operand 0 is computed in the group, or uniform"
    g = Graph()
    x = g.add("transpose", [g.tensor(1, 8, 6, 5)], TransposeAttributes((0, 1, 3, 2)))
    y = g.add("conv", [x, g.weights(8, 8, 1, 1)], ONE)
    assert reason(g.group(y)) == "operand 0 is computed in the group, or uniform"


def test_refuses_a_result_that_is_moved_and_then_computed_with():
    g = Graph()
    y = g.add("matmul", [g.tensor(4, 6), g.tensor(6, 5)])
    turned = g.add("transpose", [y], TransposeAttributes((1, 0)))
    group = g.group(g.add("tanh", [turned]))
    assert reason(group) == "a primitive is not part of the chain"
    g = Graph()
    y = g.add("matmul", [g.tensor(4, 6), g.tensor(6, 5)])
    flat = g.add("reshape", [y], ReshapeAttributes((2, 10)))
    group = g.group(g.add("transpose", [flat], TransposeAttributes((1, 0))))
    assert reason(group) == "a primitive is not part of the chain"


def test_refuses_a_view_that_is_read_elsewhere_too():
    g = Graph()
    turned = g.add("transpose", [g.tensor(4, 4)], TransposeAttributes((1, 0)))
    y = g.add("matmul", [turned, g.tensor(4, 4)])
    group = g.group(g.add("add", [y, turned]))
    assert reason(group) == "the other operand of add is computed in the group"


def test_refuses_operands_that_are_computed():
    g = Graph()
    y = g.add("conv", [g.add("abs", [g.tensor(1, 8, 6, 6)]), g.weights(8, 8, 1, 1)], ONE)
    assert reason(g.group(y)) == "operand 0 is computed in the group, or uniform"


def test_takes_uniform_weights(provider, target):
    g = Graph()
    y = g.add("conv", [g.tensor(1, 8, 6, 6), g.constant(np.ones((8, 8, 1, 1), np.float32))], ONE)
    group = g.group(y)
    assert group.constant_inputs == {1}
    assert not isinstance(provider.offer(group, target), Refusal)


def test_refuses_sums_over_windows_that_are_no_average():
    expected = "a sum over windows is not an average"
    x = (1, 16, 8, 8)
    assert reason(pool_group("pool_sum", x, (2, 2))) == expected
    wrong = pool_group("pool_sum", x, (2, 2), chain=lambda g, y: g.with_number("div", y, 3.0))
    assert reason(wrong) == expected
    inverse = pool_group("pool_sum", x, (2, 2), chain=lambda g, y: g.with_number("div", y, 4.0, left=False))
    assert reason(inverse) == expected


def test_refuses_windows_in_the_pads_and_on_other_axes():
    group = pool_group("pool_max", (1, 4, 8, 8), (2, 2), pads=(2, 0, 0, 0))
    assert reason(group) == "a window lies in the pads"
    between = pool_group("pool_max", (1, 4, 1, 4), (2, 2), pads=(1, 0, 1, 0), dilation=2, stride=1)
    assert reason(between) == "a window lies in the pads"
    few = pool_group("pool_max", (4, 8, 8), (2, 2))
    assert reason(few) == "the windows are not on all axes but the first two"


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (lambda g, y: g.add("add", [y, y]), "the other operand of add is computed in the group"),
        (lambda g, y: g.add("add", [y, g.add("tanh", [y])]), "a value of the chain is read twice"),
        (lambda g, y: g.add("sin", [y]), "sin is not a post-operation"),
        (lambda g, y: g.with_number("pow", y, 3.0), "pow with 3 is not a post-operation"),
        (lambda g, y: g.with_number("div", y, 3.0), "div with 3 is not a post-operation"),
        (lambda g, y: g.with_number("div", y, 2.0, left=False), "div with 2 is not a post-operation"),
        (lambda g, y: g.with_number("add", y, float("inf")), "add with inf is not a post-operation"),
        (lambda g, y: g.with_tensor("div", y, g.tensor(1, 8, 1, 1), left=False), "div is not a post-operation"),
        (
            lambda g, y: g.with_tensor("add", y, g.add("tanh", [g.tensor(1, 8, 1, 1)])),
            "the other operand of add is computed in the group",
        ),
        (lambda g, y: g.add("max", [y, g.with_number("mul", y, 1.5)]), "a value of the chain is read twice"),
    ],
)
def test_refuses_what_is_no_post_operation(chain, expected):
    assert reason(conv_with(chain)) == expected


def gate(g, y, factor):
    gated = g.add("sigmoid", [g.with_number("mul", y, factor)])
    return g.add("mul", [y, gated]), gated


def test_an_activation_is_taken_only_if_nothing_else_looks_into_it():
    whole = match_group(conv_with(lambda g, y: gate(g, y, 2.0)[0]))
    assert isinstance(whole, OneDnnOp)
    assert whole.post == (Eltwise("swish", 2.0),)
    shared = conv_with(lambda g, y: g.add("add", list(gate(g, y, 2.0))))
    assert reason(shared) == "a value of the chain is read twice"


def test_an_activation_with_other_numbers_is_none():
    def almost_gelu(g, y):
        curve = g.add("erf", [g.with_number("mul", y, 0.7)])
        return g.add("mul", [g.with_number("mul", y, 0.5), g.with_number("add", curve, 1.0)])

    assert reason(conv_with(almost_gelu)) == "a value of the chain is read twice"
    infinite = conv_with(lambda g, y: gate(g, y, float("inf"))[0])
    assert reason(infinite) == "a value of the chain is read twice"


def test_two_bounds_that_cross_stay_two():
    def chain(g, y):
        return g.with_number("max", g.with_number("min", y, -0.5), 0.5)

    found = match_group(conv_with(chain))
    assert isinstance(found, OneDnnOp)
    assert [operation.kind for operation in found.post] == ["clip", "clip"]


def test_refuses_long_chains():
    def chain(g, y):
        for i in range(17):
            y = g.with_tensor("mul", y, g.weights(1, 8, 1, 1 + 0 * i))
        return y

    assert reason(conv_with(chain)) == "there are more than 16 post-operations"


def test_refuses_a_second_branch():
    g = Graph()
    x = g.tensor(1, 8, 4, 4)
    y = g.add("conv", [x, g.weights(8, 8, 1, 1)], ONE)
    group = g.group(g.add("add", [y, g.add("abs", [x])]))
    assert reason(group) == "the other operand of add is computed in the group"


def test_refuses_what_only_its_reference_runs(provider, target):
    dilated = pool_group("pool_max", (1, 16, 9, 9), (2, 2), stride=1, dilation=2)
    expected = Refusal("oneDNN has only reference code for it")
    assert provider.offer(dilated, target) == expected
    # A tensor of less rank has no layout but the plain one, where only a gemm runs it.
    flat = conv_group(
        (1, 16, 6, 5), (32, 16, 3, 3), pads=SAME, chain=lambda g, y: g.with_tensor("add", y, g.tensor(32, 6, 5))
    )
    assert provider.offer(flat, target) == expected


def test_refuses_to_build_what_it_did_not_offer(provider, target):
    group = conv_group((1, 8, 6, 6), (8, 8, 3, 3))
    plain = Layout.plain(4)
    strange = Offer((plain, plain), (Layout.parse("cdab"),))
    assert provider.build(group, strange, target) == Refusal("oneDNN does not run it in these layouts")
    assert isinstance(provider.build(conv_with(lambda g, y: g.add("sin", [y])), strange, target), Refusal)


def test_every_lone_linear_primitive_has_an_offer(provider, target):
    groups = [
        conv_group((1, 7, 6, 5), (9, 7, 2, 3), dilation=2, pads=(1, 2, 3, 1)),
        conv_group((1, 6, 6, 6), (9, 2, 3, 3), groups=3, constant=False),
        conv_group((1, 6, 6, 6, 6), (6, 2, 3, 3, 3), groups=3, dilation=2, constant=False),
        conv_group((1, 6, 7), (6, 1, 3), groups=6, dilation=3, constant=False),
        conv_group((1, 6, 6, 6), (6, 5, 3, 3), groups=2, dilation=2, transposed=True),
        matmul_group((3, 1, 2, 5, 7), (1, 4, 2, 7, 1)),
        matmul_group((1, 1), (1, 1)),
    ]
    for group in groups:
        assert not isinstance(provider.offer(group, target), Refusal), group.text


def test_offers_no_reference_code_where_there_is_other(provider, target):
    for group in (
        conv_group((1, 3, 20, 20), (32, 3, 9, 9)),
        conv_group((1, 32, 16, 16), (32, 16, 2, 2), stride=2, transposed=True),
        conv_group((1, 32, 8, 8), (32, 1, 3, 3), groups=32),
    ):
        for offer in provider.offer(group, target):
            answer = LibraryAnswer(provider.implementation(group, offer, target), None, 0)
            assert answer.implementation
            assert not answer.is_reference


def test_few_input_or_output_channels_have_offers(provider, target):
    if target.lanes != 16:
        pytest.skip("the layouts are those of AVX-512")
    first = provider.offer(conv_group((1, 3, 24, 24), (32, 3, 9, 9)), target)
    last = provider.offer(conv_group((1, 32, 24, 24), (3, 32, 9, 9)), target)
    assert ("abcd", "aBcd16b") in {(str(o.inputs[0]), str(o.outputs[0])) for o in first}
    assert ("acdb", "acdb") in {(str(o.inputs[0]), str(o.outputs[0])) for o in last}


def test_reshaped_constants_are_not_packed(provider, target):
    g = Graph()
    w = g.add("reshape", [g.tensor(96, 48)], ReshapeAttributes((48, 96)))
    group = g.group(g.add("matmul", [g.tensor(32, 48), w]))
    group = replace(group, constant_inputs=frozenset({1}))
    assert {str(offer.inputs[1]) for offer in provider.offer(group, target)} == {"ab"}


def test_constant_weights_are_packed_and_others_are_not(provider, target):
    constant = provider.offer(conv_group((1, 32, 8, 8), (32, 32, 3, 3)), target)
    variable = provider.offer(conv_group((1, 32, 8, 8), (32, 32, 3, 3), constant=False), target)
    assert any(not offer.inputs[1].is_plain for offer in constant)
    assert all(offer.inputs[1].is_plain for offer in variable)


def test_a_bias_is_no_post_operation():
    found = match_group(conv_group((1, 8, 6, 6), (8, 8, 3, 3), bias=True))
    assert isinstance(found, OneDnnOp)
    assert (found.bias, found.post) == (2, ())


def test_bounds_become_one_clip():
    def chain(g, y):
        return g.with_number("min", g.with_number("max", y, 0.0), 6.0)

    found = match_group(conv_with(chain))
    assert isinstance(found, OneDnnOp)
    assert found.post == (Eltwise("clip", 0.0, 6.0),)


@pytest.mark.parametrize(
    ("layout", "dims", "axes", "expected"),
    [
        ("aBCde16c16b", (4, 16, 16, 3, 3), (0, 0, 1, 2, 3), "ABcd16b16a"),
        ("aBCde16c16b", (4, 8, 16, 3, 3), (0, 0, 1, 2, 3), None),
        ("Abcde16a", (24, 1, 1, 3, 3), (0, 0, 1, 2, 3), "Abcd16a"),
        ("Abcde16a", (24, 2, 1, 3, 3), (0, 0, 1, 2, 3), None),
        ("aBcde16b", (24, 1, 1, 3, 3), (0, 0, 1, 2, 3), None),
        ("decbA16a", (24, 1, 1, 3, 3), (0, 0, 1, 2, 3), "cdbA16a"),
        ("acBde16b", (2, 16, 4, 3, 3), (0, 0, 1, 2, 3), None),
        ("BAcd16b16a", (32, 16, 3, 3), (1, 0, 2, 3), "ABcd16a16b"),
        ("ABcd16b16a", (32, 16, 3, 3), (0, 1, 2, 3), "ABcd16b16a"),
    ],
)
def test_layouts_of_weights_with_groups(layout, dims, axes, expected):
    found = model_layout(Layout.parse(layout), dims, axes)
    assert (None if found is None else str(found)) == expected


def test_layouts_change_between_all_pairs(provider, target):
    graph = GraphBuilder()
    value = graph.input("x", ValueType.parse("f32[1,32,4,4]"))
    graph.output("y", graph.add("abs", [value]))
    offers = provider.offer(make_layout_change(graph.freeze(), value), target)
    assert len(offers) == len(set(offers)) == 6
    assert all(offer.inputs != offer.outputs for offer in offers)


SPECIALS = np.array([np.nan, np.inf, -np.inf, -1, 1, 0, 1e30, -1e30], np.float32)


RELU_OF_SPECIALS = np.array([np.nan, np.inf, 0, 0, 1, 0, 1e30, 0], np.float32)


@pytest.mark.parametrize("propagate_nan", [False, True])
def test_what_relu_makes_of_special_numbers(provider, target, builder, propagate_nan):
    provider = OneDnnProvider(propagate_nan) if propagate_nan else provider
    group = conv_group((1, 16, 1, 8), (16, 16, 1, 1), constant=False, chain=lambda g, y: g.with_number("max", y, 0.0))
    group = replace(group, constant_inputs=frozenset({1}))
    x = np.zeros((1, 16, 1, 8), np.float32)
    x[0, 0, 0] = SPECIALS
    w = np.zeros((16, 16, 1, 1), np.float32)
    w[0, 0] = 1
    for offer in provider.offer(group, target):
        kernel = provider.build(group, offer, target)
        expected = RELU_OF_SPECIALS.copy()
        if not propagate_nan and "gemm" in provider.implementation(group, offer, target):
            expected[2] = np.nan  # 0 times -inf
        elif not propagate_nan:
            expected[0] = 0  # max as the processor has it
        (y,) = run_kernel(kernel, group, offer, [x, w], builder)
        np.testing.assert_array_equal(y[0, 0, 0], expected)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (conv_with(lambda g, y: g.add("exp", [y])), "exp loses NaN or infinity"),
        (conv_with(lambda g, y: g.with_number("min", y, 6.0)), "clip loses NaN or infinity"),
        (conv_with(lambda g, y: g.with_tensor("max", y, g.tensor(1, 8, 1, 1))), "max loses NaN or infinity"),
        (pool_group("pool_max", (1, 16, 8, 8), (2, 2)), "pool_max loses NaN"),
    ],
)
def test_refuses_what_loses_nan_if_asked_to(group, expected):
    assert isinstance(match_group(group), OneDnnOp)
    assert reason(group, propagate_nan=True) == expected


def test_the_version_names_library_schema_and_numbers(provider):
    assert provider.version.startswith("3.")
    assert OneDnnProvider(propagate_nan=True).version == provider.version + "-nan"


def test_is_left_out_without_the_library(monkeypatch):
    monkeypatch.setattr("korch.provider.onednn.api.find_library", lambda name: None)
    with pytest.raises(ImportError, match=re.escape(f"oneDNN is not installed; {install_command('onednn')}")):
        OneDnnProvider(propagate_nan=False)


def test_answers_and_sources_are_equal_for_equal_groups(provider, target):
    group = conv_group((1, 8, 6, 6), (8, 8, 3, 3), pads=SAME, bias=True)
    again = conv_group((1, 8, 6, 6), (8, 8, 3, 3), pads=SAME, bias=True)
    offers = provider.offer(group, target)
    assert offers == OneDnnProvider(propagate_nan=False).offer(again, target)
    for offer in offers:
        assert provider.build(group, offer, target) == provider.build(again, offer, target)
