"""Convolutions of all kinds by tile programs, compiled, run and compared with the reference."""

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import SliceAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.conv import ConvProvider
from korch.provider.conv.vectors import WINDOWS, plans_of
from korch.provider.provider import Kernel
from korch.schedule.windows import ConvBlocking
from korch.target import Target
from korch.testing.kernels import check_kernel, check_offers, load_kernels
from korch.testing.samples import random_arrays
from tests.provider.linear_groups import Graph


def conv(
    shape: tuple[int, ...],
    channels: int,
    window,
    stride=1,
    pad=1,
    dilation=1,
    groups: int = 1,
    *,
    is_constant: bool = True,
    kind: DType = DType.F32,
    steps=lambda g, x, y: y,
) -> Group:
    """A convolution with a bias, and what `steps` adds to it."""
    g = Graph()
    rank = len(shape) - 2
    window, *numbers = (n if isinstance(n, tuple) else (n,) * rank for n in (window, stride, pad, dilation))
    size = (channels, shape[1] // groups, *window)
    x = g.input("x0", ValueType(shape, kind))
    w = g.weights(*size) if is_constant else g.tensor(*size)
    x = x if kind is DType.F32 else g.add("cast", [x], CastAttributes(DType.F32))
    strides, pads, dilations = numbers
    y = g.add("conv", [x, w], ConvAttributes(strides, pads, pads, dilations, groups))
    y = g.with_tensor("add", y, g.weights(1, channels, *(1,) * rank))
    return g.group(steps(g, x, y))


def gated(g: Graph, x: int, y: int) -> int:
    """Clamp, multiply by a sigmoid and add a tensor of the result's shape."""
    y = g.add("mul", [y, g.add("sigmoid", [y])])
    return g.with_tensor("add", g.with_number("max", y, -0.25), g.tensor(*g.type(y).shape))


def kinds(n: int) -> dict[str, Group]:
    """Groups that differ in rank, groups, channels and windows, for vectors of n lanes."""
    return {
        "one axis": conv((2, n + 3, 83), 2 * n + 1, 3, steps=gated),
        "one strided axis": conv((1, 3, 90), 7, 10, stride=5, pad=0),
        "one axis, channel by channel": conv((1, 5, 70), 5, 3, groups=5, steps=gated),
        "three axes": conv((1, n, 4, 5, 9), 2 * n, (2, 3, 3), pad=(0, 1, 1), steps=gated),
        "three strided axes": conv((1, 2, 5, 9, 8), 3, 3, stride=(1, 2, 2)),
        "groups": conv((1, 4 * n, 7, 9), 4 * n, 3, groups=2, steps=gated),
        "groups of few": conv((2, 12, 9, 20), 12, 3, groups=3),
        "multiplied": conv((1, 4, 9, 18), 8, (3, 2), stride=(2, 1), pad=(1, 0), groups=4),
        "long lines": conv((2, 3, 5, 67), n + 3, (3, 5), stride=(1, 2), pad=(1, 3), dilation=(1, 2), steps=gated),
        "lines of one place": conv((1, n, 4, 3), n, (3, 7), pad=(1, 2)),
        "narrow lines": conv((1, n, 3, 2), n, (3, 5), pad=(2, 4)),
        "few terms": conv((1, n, 3, 13), 4 * n, 1, pad=0, steps=gated),
        "lines of few terms": conv((1, 3, 4, 30), 4 * n, 3),
        "known at run time": conv((1, 5, 9, 11), 9, 3, dilation=(1, 2), pad=(1, 2), is_constant=False),
        "one place": conv((1, n, 3), n, 3, pad=0),
        "channel by channel": conv((2, 2 * n, 9, 19), 2 * n, 3, stride=(2, 1), groups=2 * n, steps=gated),
        "channel by channel, some lanes": conv((1, n + 3, 7, 12), n + 3, 5, pad=2, groups=n + 3, steps=gated),
        "channel by channel, few": conv((1, 3, 6, 9), 3, 3, groups=3),
        "channel by channel, wide": conv((1, n, 5, 21), n, (3, 11), pad=(1, 5), groups=n),
        "channel by channel, far apart": conv((1, n, 4, 23), n, 3, pad=(1, 12), dilation=(1, 12), groups=n),
        "channel by channel, narrow": conv((1, n, 6, 2), n, (3, 5), stride=2, pad=(1, 2), groups=n),
        "channel by channel, three axes": conv((1, n, 4, 5, 9), n, (2, 3, 3), pad=(1, 1, 0), groups=n, steps=gated),
        "channel by channel, of 16 bits": conv((1, n, 5, 10), n, 3, groups=n, kind=DType.F16),
    }


def check(groups: list[Group], target, builder, rng) -> list[tuple[Group, Offer, Kernel]]:
    checked = check_offers(ConvProvider(), groups, target, builder, rng)
    assert all(offer.variant.startswith(WINDOWS) for _, offer, _ in checked)
    return checked


def test_every_kind(target, builder, rng):
    checked = check([*kinds(target.lanes).values()], target, builder, rng)
    library = load_kernels([kernel for _, _, kernel in checked], builder)
    for group, offer, kernel in checked:
        inputs = random_arrays(rng, group.input_types)
        for number in (np.nan, np.inf):
            inputs[0].reshape(-1)[rng.integers(inputs[0].size)] = number
        with np.errstate(invalid="ignore"):
            check_kernel(kernel, group, offer, inputs, builder, library)


def test_pixels_of_few_terms_have_wide_tiles():
    def registers(channels: int) -> set[tuple[int, int]]:
        plans = plans_of(conv((1, channels, 9, 40), 64, 1, pad=0), Target(isa="avx512", lanes=16))
        assert not isinstance(plans, Refusal)
        found = (plan.blocking.registers for plan in plans if isinstance(plan.blocking, ConvBlocking))
        return {(registers.rows, registers.vectors) for registers in found}

    assert registers(32) == {(6, 4)}
    assert registers(48) == {(14, 2)}


def test_channels_of_groups_are_read_in_blocks_where_they_fill_vectors(target):
    found = kinds(target.lanes)

    def layouts(name: str) -> set[str]:
        plans = plans_of(found[name], target)
        assert not isinstance(plans, Refusal)
        return {str(plan.offer.inputs[0]) for plan in plans}

    n = target.lanes
    assert layouts("groups") == {"abcd", "acdb", f"aBcd{n}b"}
    assert layouts("groups of few") == {"abcd"}
    assert layouts("three axes") == {"abcde", "acdeb", f"aBcde{n}b"}
    assert layouts("channel by channel") == {"acdb", f"aBcd{n}b"}
    assert layouts("channel by channel, some lanes") == {"acdb"}
    assert layouts("channel by channel, few") == {"abcd", "acdb"}


def test_what_is_refused(target):
    def reason(group: Group) -> str:
        found = ConvProvider().offer(group, target)
        assert isinstance(found, Refusal)
        return found.reason

    assert reason(conv((0, 4, 9), 4, 3)) == "a tensor is empty"
    first = SliceAttributes((0, 0, 0), (1, 4, 5), (1, 1, 1))
    moved = conv((1, 4, 9), 4, 3, steps=lambda g, x, y: g.add("slice", [y], first))
    assert reason(moved) == "an output is not computed from the product element by element"
