"""Every offer of oneDNN, compiled, run and compared with the reference in float64."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from korch.candidate.candidate import make_layout_change
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import PadAttributes, ReshapeAttributes, TransposeAttributes
from korch.primitive.types import ValueType
from korch.provider.onednn import OneDnnProvider
from korch.testing.kernels import check_kernel, check_offers, load_kernels, run_kernel
from tests.provider.onednn_groups import Graph, conv_group, matmul_group, pool_group

SAME = (1, 1, 1, 1)
TASKS = Path("/proc/self/task")  # a folder for each thread of the process


@pytest.fixture(scope="module")
def provider():
    try:
        return OneDnnProvider(propagate_nan=False)
    except ImportError as error:
        pytest.skip(str(error))


def relu(g, y):
    return g.with_number("max", y, 0.0)


def test_convolutions_in_every_layout(provider, target, builder, rng):
    groups = [
        conv_group((1, 3, 19, 17), (32, 3, 5, 5), bias=True, chain=relu),
        conv_group((2, 16, 9, 11), (32, 16, 3, 3), pads=(1, 0, 2, 1), bias=True),
        conv_group((1, 16, 12, 13), (48, 16, 3, 3), stride=2, pads=SAME),
        conv_group((1, 32, 13, 12), (16, 32, 3, 3), dilation=2, pads=(2, 2, 2, 2)),
        conv_group((1, 32, 9, 9), (3, 32, 3, 3), pads=SAME, bias=True),
        conv_group((1, 24, 7, 5), (40, 24, 1, 1), bias=True),
        conv_group((1, 32, 7, 5), (64, 32, 1, 1), stride=2),
        conv_group((1, 5, 7, 9), (7, 5, 3, 2)),
        conv_group((1, 16, 8, 8), (32, 16, 3, 3), constant=False),
        conv_group((1, 16, 1, 1), (16, 16, 1, 1)),
    ]
    checked = check_offers(provider, groups, target, builder, rng)
    kinds = {tuple(map(str, (offer.inputs[0], *offer.outputs))) for _, offer, _ in checked}
    assert {("abcd", "abcd"), ("acdb", "acdb"), ("abcd", "aBcd16b"), ("aBcd16b", "aBcd16b")} <= (
        kinds if target.lanes == 16 else kinds | {("abcd", "aBcd16b"), ("aBcd16b", "aBcd16b")}
    )


def test_convolutions_with_groups_in_every_layout(provider, target, builder, rng):
    groups = [
        conv_group((1, 32, 9, 9), (32, 1, 3, 3), pads=SAME, groups=32, bias=True, chain=relu),
        conv_group((1, 24, 9, 9), (24, 1, 5, 5), pads=(2, 2, 2, 2), stride=2, groups=24),
        conv_group((1, 64, 8, 8), (64, 16, 3, 3), pads=SAME, groups=4),
        conv_group((1, 32, 8, 8), (32, 8, 3, 3), pads=SAME, groups=4),
        conv_group((1, 16, 8, 8), (32, 1, 3, 3), groups=16),
        conv_group((1, 12, 8, 8), (6, 4, 3, 3), groups=3),
        conv_group((1, 32, 8, 8), (32, 1, 3, 3), groups=32, constant=False),
    ]
    check_offers(provider, groups, target, builder, rng)


def test_transposed_convolutions_in_every_layout(provider, target, builder, rng):
    groups = [
        conv_group((1, 32, 6, 7), (32, 16, 2, 2), stride=2, transposed=True, bias=True),
        conv_group((1, 16, 6, 7), (16, 32, 3, 3), stride=2, pads=SAME, output_padding=1, transposed=True, chain=relu),
        conv_group((1, 32, 6, 6), (32, 1, 4, 4), stride=2, pads=SAME, groups=32, transposed=True),
        conv_group((1, 32, 6, 6), (32, 8, 3, 3), groups=2, transposed=True),
        conv_group((1, 16, 6, 7), (16, 32, 3, 3), stride=2, output_padding=1, transposed=True),
        conv_group((1, 6, 5, 5), (6, 4, 3, 3), dilation=2, pads=(1, 0, 0, 2), transposed=True),
        conv_group((1, 16, 5, 5), (16, 16, 3, 3), transposed=True, constant=False),
    ]
    check_offers(provider, groups, target, builder, rng)


def test_convolutions_in_one_and_three_dimensions(provider, target, builder, rng):
    groups = [
        conv_group((2, 8, 33), (12, 8, 3), pads=(1, 1), bias=True, chain=relu),
        conv_group((1, 8, 20), (8, 1, 4), stride=2, groups=8),
        conv_group((1, 16, 5, 6, 7), (32, 16, 3, 3, 3), pads=(1, 1, 1, 1, 1, 1), bias=True),
        conv_group((1, 3, 6, 6, 6), (8, 3, 2, 2, 2), stride=2),
    ]
    check_offers(provider, groups, target, builder, rng)


def test_a_pad_before_a_convolution_is_taken_in(provider, target, builder, rng):
    pad = PadAttributes((0, 0, 2, 1), (0, 0, 1, 3))
    groups = [conv_group((1, 16, 8, 8), (16, 16, 3, 3), pads=SAME, pad=pad, bias=True)]
    assert len(check_offers(provider, groups, target, builder, rng)) > 1


def test_matrix_products(provider, target, builder, rng):
    groups = [
        matmul_group((7, 33), (33, 19)),
        matmul_group((1, 64), (64, 40), constant=True),
        matmul_group((3, 5, 7), (3, 7, 9)),
        matmul_group((2, 1, 5, 7), (1, 3, 7, 9)),
        matmul_group((2, 3, 5, 7), (1, 1, 7, 9)),
        matmul_group((2, 7, 5), (2, 7, 9), swap_a=True),
        matmul_group((2, 5, 7), (2, 9, 7), swap_b=True),
        matmul_group((2, 7, 5), (2, 9, 7), swap_a=True, swap_b=True),
        matmul_group((1, 50, 48), (1, 48, 80), constant=True),
        matmul_group((4, 50, 48), (1, 48, 80), constant=True),
        matmul_group((50, 48), (80, 48), constant=True, swap_b=True),
        matmul_group((1, 50, 48), (1, 80, 48), constant=True, swap_b=True),
        matmul_group(
            (50, 48), (48, 80), constant=True, chain=lambda g, y: relu(g, g.with_tensor("add", y, g.weights(80)))
        ),
        matmul_group(
            (2, 4, 6, 8),
            (2, 4, 8, 6),
            chain=lambda g, y: g.with_tensor("add", g.with_number("mul", y, 0.125), g.tensor(2, 1, 1, 6)),
        ),
    ]
    checked = check_offers(provider, groups, target, builder, rng)
    packed = [offer for group, offer, _ in checked if not offer.inputs[-1].is_plain]
    assert packed or target.lanes != 16


def test_views_of_a_matrix_products_tensors(provider, target, builder, rng):
    """Attention: heads are split, taken to the front, and joined again, without a copy."""

    def heads(g, *perm):
        value = g.add("reshape", [g.tensor(2, 6, 32)], ReshapeAttributes((2, 6, 4, 8)))
        return g.add("transpose", [value], TransposeAttributes(perm))

    g = Graph()
    scores = g.add("matmul", [heads(g, 0, 2, 1, 3), heads(g, 0, 2, 3, 1)])
    first = g.group(g.with_number("mul", scores, 0.25))
    g = Graph()
    y = g.add("matmul", [g.tensor(2, 4, 6, 6), heads(g, 0, 2, 1, 3)])
    y = g.add("transpose", [y], TransposeAttributes((0, 2, 1, 3)))
    second = g.group(g.add("reshape", [y], ReshapeAttributes((2, 6, 32))))
    g = Graph()
    y = g.add("matmul", [g.tensor(5, 6), g.add("reshape", [g.tensor(1, 6, 7)], ReshapeAttributes((6, 7)))])
    y = g.with_tensor("add", g.add("tanh", [g.with_tensor("add", y, g.weights(7))]), g.tensor(5, 7))
    third = g.group(g.add("reshape", [y], ReshapeAttributes((1, 1, 5, 7))))
    g = Graph()
    turned = g.add("transpose", [g.tensor(2, 5, 3, 4)], TransposeAttributes((1, 2, 0, 3)))
    twice = g.add("transpose", [turned], TransposeAttributes((1, 0, 2, 3)))
    y = g.add("matmul", [twice, g.tensor(3, 5, 4, 6)])
    y = g.add("transpose", [y], TransposeAttributes((2, 0, 1, 3)))
    fourth = g.group(y)
    checked = check_offers(provider, [first, second, third, fourth], target, builder, rng)
    assert {group.key for group, _, _ in checked} == {g.key for g in (first, second, third, fourth)}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("inner", [1, 16])
@pytest.mark.parametrize("columns", [1, 8])
def test_turned_matrices_of_one_row_column_or_element(provider, target, builder, rng, rows, inner, columns):
    turn = TransposeAttributes((0, 2, 1))
    groups = []
    # Turned results first: the library keeps primitives, and takes one that was made for rows.
    for turned in reversed(range(8 if rows == 1 else 4)):
        g = Graph()
        a = g.tensor(1, inner, rows) if turned & 1 else g.tensor(1, rows, inner)
        b = g.weights(1, columns, inner) if turned & 2 else g.weights(1, inner, columns)
        a = g.add("transpose", [a], turn) if turned & 1 else a
        b = g.add("transpose", [b], turn) if turned & 2 else b
        y = g.with_tensor("add", g.add("matmul", [a, b]), g.weights(1, 1, columns))
        groups.append(g.group(g.add("transpose", [y], turn) if turned & 4 else y))
    check_offers(provider, groups, target, builder, rng)


def test_pooling(provider, target, builder, rng):
    def average(number):
        return lambda g, y: g.with_number("div", y, number)

    groups = [
        pool_group("pool_max", (1, 32, 9, 9), (3, 3), pads=SAME),
        pool_group("pool_max", (2, 5, 8, 8), (2, 2)),
        pool_group("pool_max", (1, 16, 9, 9), (2, 2), pads=(0, 0, 1, 1)),
        pool_group("pool_max", (1, 4, 12), (3,)),
        pool_group("pool_max", (1, 16, 6, 6, 6), (2, 2, 2)),
        pool_group("pool_max", (1, 16, 8, 8), (2, 2), chain=relu),
        pool_group("pool_sum", (1, 32, 9, 9), (3, 3), pads=SAME, chain=average(9.0)),
        pool_group("pool_sum", (1, 32, 8, 8), (2, 2), chain=lambda g, y: g.with_number("mul", y, 0.25)),
        pool_group("pool_sum", (1, 16, 9, 9), (3, 3), chain=lambda g, y: g.with_number("mul", y, 1 / 9)),
    ]
    check_offers(provider, groups, target, builder, rng)


def test_changes_of_layout(provider, target, builder, rng):
    groups = []
    for shape in ((2, 32, 5, 7), (1, 6, 5, 7), (1, 16, 3, 4, 5)):
        graph = GraphBuilder()
        value = graph.input("x", ValueType(shape, ValueType.parse("f32[1]").dtype))
        graph.output("y", graph.add("abs", [value]))
        groups.append(make_layout_change(graph.freeze(), value))
    checked = check_offers(provider, groups, target, builder, rng)
    assert len(checked) == (6 + 2 + 6 if target.lanes == 16 else len(checked))


def with_other(op, *shape, left=True):
    return lambda g, y: g.with_tensor(op, y, g.tensor(*shape), left)


def unary(op, g, y):
    return g.add(op, [y])


def softplus(g, y):
    small = g.add("exp", [g.add("neg", [g.add("abs", [y])])])
    return g.add("add", [relu(g, y), g.add("log", [g.with_number("add", small, 1.0)])])


def leaky_by_choice(g, y):
    return g.add("where", [g.with_number("less", y, 0.0), g.with_number("mul", y, 0.3), y])


def gelu_tanh(g, y):
    cube = g.add("mul", [g.add("mul", [y, y]), y])
    inner = g.add("add", [y, g.with_number("mul", cube, 0.044715)])
    curve = g.add("tanh", [g.with_number("mul", inner, math.sqrt(2 / math.pi))])
    return g.add("mul", [g.with_number("mul", y, 0.5), g.with_number("add", curve, 1.0)])


def elu(g, y):
    below = g.with_number("sub", g.add("exp", [g.with_number("min", y, 0.0)]), 1.0)
    return g.add("add", [relu(g, y), below])


CHAINS = {
    "softplus": softplus,
    "leaky-by-choice": leaky_by_choice,
    "gelu-tanh": gelu_tanh,
    "elu-of-one": elu,
    "relu": relu,
    "bounded": lambda g, y: g.with_number("min", g.with_number("max", y, 0.0), 6.0),
    "clip": lambda g, y: g.with_number("max", g.with_number("min", y, 0.7), -0.3),
    "floor-at": lambda g, y: g.with_number("max", y, 0.25),
    "empty-clip": lambda g, y: g.with_number("max", g.with_number("min", y, -0.5), 0.5),
    "scale-shift": lambda g, y: g.with_number("add", g.with_number("mul", y, 0.3), 1.5),
    "from-number": lambda g, y: g.with_number("sub", y, 1.0, left=False),
    "minus-number": lambda g, y: g.with_number("sub", y, 1.0),
    "quarter": lambda g, y: g.with_number("div", y, 4.0),
    "sigmoid": partial(unary, "sigmoid"),
    "tanh": partial(unary, "tanh"),
    "exp": partial(unary, "exp"),
    "abs": partial(unary, "abs"),
    "neg": partial(unary, "neg"),
    "sqrt-abs": lambda g, y: g.add("sqrt", [g.add("abs", [y])]),
    "log-abs": lambda g, y: g.add("log", [g.with_number("add", g.add("abs", [y]), 1.0)]),
    "square": lambda g, y: g.add("mul", [y, y]),
    "swish": lambda g, y: g.add("mul", [y, g.add("sigmoid", [y])]),
    "swish-scaled": lambda g, y: g.add("mul", [g.add("sigmoid", [g.with_number("mul", y, 1.702)]), y]),
    "hardswish": lambda g, y: g.add(
        "mul",
        [
            y,
            g.with_number(
                "min", g.with_number("max", g.with_number("add", g.with_number("mul", y, 1 / 6), 0.5), 0.0), 1.0
            ),
        ],
    ),
    "leaky": lambda g, y: g.add("max", [y, g.with_number("mul", y, 0.1)]),
    "elu": lambda g, y: g.add(
        "add",
        [
            relu(g, y),
            g.with_number("mul", g.with_number("sub", g.add("exp", [g.with_number("min", y, 0.0)]), 1.0), 0.7),
        ],
    ),
    "gelu": lambda g, y: g.add(
        "mul",
        [
            g.with_number("mul", y, 0.5),
            g.with_number("add", g.add("erf", [g.with_number("mul", y, math.sqrt(0.5))]), 1.0),
        ],
    ),
    "gelu-exported": lambda g, y: g.with_number(
        "mul", g.add("mul", [y, g.with_number("add", g.add("erf", [g.with_number("div", y, math.sqrt(2))]), 1.0)]), 0.5
    ),
    "mish": lambda g, y: g.add(
        "mul",
        [
            y,
            g.add(
                "tanh",
                [
                    g.add(
                        "add",
                        [
                            relu(g, y),
                            g.add(
                                "log", [g.with_number("add", g.add("exp", [g.add("neg", [g.add("abs", [y])])]), 1.0)]
                            ),
                        ],
                    )
                ],
            ),
        ],
    ),
    "residual": lambda g, y: relu(g, with_other("add", 1, 32, 6, 5)(g, y)),
    "residual-first": with_other("add", 1, 32, 6, 5, left=False),
    "per-channel-product": with_other("mul", 1, 32, 1, 1),
    "per-channel-difference": with_other("sub", 32, 1, 1),
    "taken-from": with_other("sub", 1, 32, 6, 5, left=False),
    "quotient": lambda g, y: g.with_tensor(
        "div",
        y,
        g.constant(np.full((1, 32, 1, 1), 1, np.float32) + np.arange(32, dtype=np.float32).reshape(1, 32, 1, 1)),
    ),
    "maximum": with_other("max", 1, 32, 6, 5),
    "minimum": with_other("min", 1, 32, 1, 1),
    "long": lambda g, y: with_other("add", 1, 32, 6, 5)(
        g, g.add("tanh", [with_other("mul", 1, 32, 1, 1)(g, relu(g, y))])
    ),
}


def test_what_follows_is_fused_in_every_layout(provider, target, builder, rng):
    groups = [conv_group((1, 16, 6, 5), (32, 16, 3, 3), pads=SAME, bias=True, chain=chain) for chain in CHAINS.values()]
    checked = check_offers(provider, groups, target, builder, rng)
    assert len(checked) >= 2 * len(groups)


def test_the_input_may_be_added_to_the_output(provider, target, builder, rng):
    def residual(g, y):
        return g.add("add", [y, 0])  # value 0 is the convolution's input

    group = conv_group((1, 32, 6, 5), (32, 32, 3, 3), pads=SAME, chain=residual)
    assert len(group.inputs) == 2
    checked = check_offers(provider, [group], target, builder, rng)
    assert all(offer.inputs[0] == offer.outputs[0] for _, offer, _ in checked)


def test_a_kernel_brings_a_workspace_if_the_one_that_was_counted_is_too_small(provider, target, builder, rng):
    # Which kernel needs one depends on the machine: matrix products with 512 bits, gathered images.
    groups = [matmul_group((64, 96), (48, 96), swap_b=True), conv_group((2, 20, 9, 9), (33, 20, 3, 3))]
    made = [(g, o, provider.build(g, o, target)) for g in groups for o in provider.offer(g, target)]
    found = [each for each in made if each[2].workspace_bytes > 64]
    assert found
    for group, offer, kernel in found:
        counted = f"i64 3, i64 {kernel.workspace_bytes} }}"
        assert kernel.source.count(counted) == 1
        small = replace(kernel, source=kernel.source.replace(counted, "i64 3, i64 64 }"), workspace_bytes=64)
        inputs = [rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types]
        check_kernel(small, group, offer, inputs, builder)


def test_a_primitive_that_is_told_to_work_alone_starts_no_threads(provider, target, builder, rng):
    group = conv_group((1, 32, 56, 56), (64, 32, 3, 3), pads=SAME, bias=True)
    offer = provider.offer(group, target)[0]
    kernel = provider.build(group, offer, replace(target, threads=13))
    inputs = [rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types]
    library = load_kernels([kernel], builder)
    started = []

    def run(runs_alone):
        """No other test has 13 threads, so that none of them are idle."""
        before = set(TASKS.iterdir())
        run_kernel(kernel, group, offer, inputs, builder, library=library, threads=13, runs_alone=runs_alone)
        started.append(len(set(TASKS.iterdir()) - before))

    for runs_alone in (True, False):
        thread = Thread(target=run, args=[runs_alone])
        thread.start()
        thread.join()
    assert started == [0, 12]
