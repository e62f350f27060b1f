"""Fused elementwise, layout and reduction primitives, in Triton's interpreter."""

import math

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal, make_layout_change
from korch.primitive.ops.elementwise import ROWS, as_tf32
from korch.provider.triton import TritonProvider
from korch.tile.triton.text import is_printable
from tests.support.cuda_kernels import check_cuda_offers, run_cuda_kernel
from tests.support.samples_of_ops import LEGAL
from tests.tile.tile_groups import FAMILIES, Graph, normalization, random_groups, softmax

PROVIDER = TritonProvider()


@pytest.mark.parametrize("family", FAMILIES)
def test_known_groups(family, small, rng):
    for group in FAMILIES[family]():
        reads = window_reads(group)
        if reads < 40_000:  # the interpreter needs a second for 20,000 of them; lesser images show the same
            check_cuda_offers(PROVIDER, [group], small, rng, most=1 if reads > 4_000 else None)


def window_reads(group: Group) -> int:
    """Return how many elements the windows of a group's pools read."""
    pools = [p for p in group.body.primitives if p.op.startswith("pool_")]
    return sum(group.body.types[p.output].size * math.prod(p.attributes.kernel) for p in pools)


@pytest.mark.parametrize("seed", range(6))
def test_random_groups(seed, small):
    rng = np.random.default_rng(seed)
    groups = [g for g in random_groups(rng, 12, 12) if not isinstance(PROVIDER.offer(g, small), Refusal)]
    assert len(groups) > 6
    check_cuda_offers(PROVIDER, groups, small, rng)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in ("cast", "round_tf32")], ids=lambda r: r.name)
def test_elementwise(row, small, rng):
    for sample in LEGAL[row.name]:
        g = Graph()
        inputs = [g.tensor(text) for text in sample.inputs]
        if not is_printable(row.name, g.type(inputs[0]).dtype):
            assert isinstance(PROVIDER.offer(g.group(g.add(row.name, inputs)), small), Refusal)
            continue
        check_cuda_offers(PROVIDER, [g.group(g.add(row.name, inputs))], small, rng)


@pytest.mark.parametrize(
    "op",
    [
        "neg",
        "abs",
        "exp",
        "tanh",
        "sigmoid",
        "erf",
        "max",
        "min",
        "isnan",
        "isinf",
        "sqrt",
        "round",
        "floor",
        "div",
        "mul",
        "sign",
    ],
)
def test_special_numbers(op, small, rng):
    row = next(row for row in ROWS if row.name == op)
    g = Graph()
    group = g.group(g.add(op, [g.tensor("f32[300]") for _ in range(row.arity or 1)]))
    check_cuda_offers(PROVIDER, [group], small, rng, specials=True)


@pytest.mark.parametrize("to", ["f16", "bf16", "f64", "i64", "i32", "u8", "bool", "i8"])
def test_casts(to, small, rng):
    groups = []
    for source in ("f32", "i32", "bool"):
        g = Graph()
        groups.append(g.group(g.cast(g.tensor(f"{source}[5,7]"), to)))
    check_cuda_offers(PROVIDER, groups, small, rng)


def test_one_plus_tanh_is_computed_without_cancellation(small):
    g = Graph()
    x = g.tensor("f32[2003]")
    group = g.group(g.add("add", [g.number(x, 1.0), g.add("tanh", [x])]))
    given = np.concatenate([np.linspace(-40, 40, 2000), [np.inf, -np.inf, np.nan]]).astype(np.float32)
    (offer,) = PROVIDER.offer(group, small)
    kernel = PROVIDER.build(group, offer, small)
    assert "f.one_plus_tanh" in kernel.launches[0].source
    (found,) = run_cuda_kernel(kernel, group, offer, [given])
    with np.errstate(all="ignore"):
        exact = 2 / (1 + np.exp(-2 * given.astype(np.float64)))
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    np.testing.assert_allclose(found[1000:], exact[1000:], rtol=2e-7)


def test_rounding_to_tf32_is_to_nearest(small):
    g = Graph()
    group = g.group(g.add("round_tf32", [g.tensor("f32[9]")]))
    x = np.array([1 + 2**-11, 1 - 2**-12, 1 + 2**-12, -(1 + 3 * 2**-11), 3.4e38, np.inf, -np.inf, np.nan, 1e-40], "f4")
    (offer,) = PROVIDER.offer(group, small)
    (found,) = run_cuda_kernel(PROVIDER.build(group, offer, small), group, offer, [x])
    np.testing.assert_array_equal(found, as_tf32(x))
    np.testing.assert_array_equal(found[:4], [1 + 2**-10, 1, 1, -(1 + 2**-9)])


def test_half_types_are_computed_in_float32(small, rng):
    groups = []
    for kind in ("f16", "bf16"):
        g = Graph()
        x = g.tensor(f"{kind}[6,50]")
        groups.append(g.group(g.add("tanh", [g.add("add", [x, g.tensor(f"{kind}[6,50]")])])))
        groups.append(softmax(f"{kind}[6,50]", 1))
    check_cuda_offers(PROVIDER, groups, small, rng)


def test_rows_are_split_where_there_are_few(small, rng):
    groups = [
        normalization("f32[1,2,64,64]", (2, 3), (1,), "relu"),
        normalization("f32[1,1,5000]", (2,)),
        softmax("f32[1,4500]", 1),
    ]
    g = Graph()
    x = g.tensor("f32[2,5000]")
    groups.append(g.group(g.reduce("sum", x, 1), g.reduce("max", x, 1)))
    found = check_cuda_offers(PROVIDER, groups, small, rng)
    split = [kernel for _, offer, kernel in found if offer.variant == "split"]
    assert len(split) >= 4 and all(len(kernel.launches) >= 2 for kernel in split)


def test_changes_of_layout(small, rng):
    g = Graph()
    x = g.tensor("f32[2,33,7,5]")
    g.output("o", g.add("neg", [x]))
    group = make_layout_change(g.freeze(), 0)
    found = check_cuda_offers(PROVIDER, [group], small, rng)
    assert len({offer.inputs + offer.outputs for _, offer, _ in found}) == 4


def test_a_nan_is_the_maximum(small):
    g = Graph()
    group = g.group(g.reduce("max", g.tensor("f32[3,70]"), 1))
    (offer, *_) = PROVIDER.offer(group, small)
    kernel = PROVIDER.build(group, offer, small)
    x = np.zeros((3, 70), np.float32)
    x[1, 5] = np.nan
    (found,) = run_cuda_kernel(kernel, group, offer, [x])
    assert np.array_equal(np.isnan(found[:, 0]), [False, True, False])


@pytest.mark.parametrize(("most", "is_short"), [(0.0, True), (-2.0, True), (1.0, False)])
def test_exponentials_of_what_is_not_above_0_are_short(most, is_short, small, rng):
    g = Graph()
    x = g.tensor("f32[3,70]")
    group = g.group(g.add("exp", [g.add("min", [x, g.number(x, most)])]))
    for _, _, kernel in check_cuda_offers(PROVIDER, [group], small, rng, specials=True):
        assert ("f.exp_of_nonpositive" in kernel.launches[0].source) is is_short
