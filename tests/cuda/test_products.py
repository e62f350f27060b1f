"""Matrix products, convolutions, attention and Winograd, in Triton's interpreter."""

import math
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Refusal, make_group
from korch.numerics import ROUNDED_FACTORS
from korch.primitive import reference
from korch.primitive.precision import with_tf32
from korch.primitive.types import DType
from korch.provider.triton import TritonAttentionProvider, TritonProductProvider, TritonWinogradProvider
from korch.provider.triton.product import ProgramTile, with_split_tail
from korch.testing.kernels import compare
from korch.testing.samples import random_arrays
from korch.testing.tolerance import assert_same
from korch.tile.ir.program import Product
from tests.cuda.cuda_groups import ATTENTIONS, PRODUCTS, WINOGRADS, attention, conv, product
from tests.support.cuda_kernels import check_cuda_offers, run_cuda_kernel
from tests.support.interpret import Memory, run_launches
from tests.tile.tile_groups import Graph

PRODUCT = TritonProductProvider()


# The interpreter multiplies the bits of bfloat16 as integers; on a device it is tested too.
@pytest.mark.parametrize("device", ["small", "whole"])
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "bfloat16"])
def test_products(name, device, request, rng):
    check_cuda_offers(PRODUCT, [PRODUCTS[name]()], request.getfixturevalue(device), rng)


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if "bfloat16" not in name])
def test_attention(name, small, rng):
    check_cuda_offers(TritonAttentionProvider(), [ATTENTIONS[name]()], small, rng)


@pytest.mark.parametrize("name", WINOGRADS)
def test_winograd(name, small, whole, rng):
    check_cuda_offers(TritonWinogradProvider(), [WINOGRADS[name]()], small, rng, most=8)
    check_cuda_offers(TritonWinogradProvider(), [WINOGRADS[name]()], whole, rng, most=2)


def test_parts_of_several_blocks_add_up(whole, rng):
    found = check_cuda_offers(
        PRODUCT, [product("f32[40,500]", "f32[500,40]"), product("f16[2,40,200]", "f16[2,200,33]")], whole, rng
    )
    parts = [kernel for _, offer, kernel in found if "p" in offer.variant.split(" ")[0]]
    assert parts and all(kernel.launches[0].grid > 8 for kernel in parts)


def test_terms_are_cut_where_tiles_are_few(small, rng):
    found = check_cuda_offers(PRODUCT, [product("f32[16,900]", "f32[900,16]")], replace(small, processors=64), rng)
    assert any("p" in offer.variant and len(kernel.launches) == 2 for _, offer, kernel in found)


def test_images_are_read_and_written_in_both_layouts(small, rng):
    found = check_cuda_offers(PRODUCT, [PRODUCTS["stem"]()], small, rng)
    assert {(str(o.inputs[0]), str(o.outputs[0])) for _, o, _ in found} == {
        ("abcd", "abcd"),
        ("acdb", "acdb"),
        ("abcd", "acdb"),
        ("acdb", "abcd"),
    }


@pytest.mark.parametrize(("rows", "kind"), [(1, "f32"), (3, "f16"), (1, "f16")])
def test_long_sums_of_few_rows(rows, kind, whole, rng):
    group = product(f"{kind}[{rows},777]", f"{kind}[777,70]")
    fixed = replace(group, constant_inputs=frozenset({1}))
    found = check_cuda_offers(PRODUCT, [fixed], whole, rng)
    variants = {offer.variant: str(offer.inputs[1]) for _, offer, _ in found}
    assert "direct" in variants and any(variant.startswith("16x") for variant in variants)
    assert {layout for variant, layout in variants.items() if variant.startswith("direct ")} == {"ab", "ba"}
    pipelined = [kernel for _, offer, kernel in found if offer.variant.endswith("s4") and "direct" in offer.variant]
    assert pipelined and all("num_stages=4" in kernel.launches[0].source for kernel in pipelined)
    assert {str(offer.inputs[1]) for offer in PRODUCT.offer(group, whole)} == {"ab"}, "it comes as it is"


def test_what_does_not_fit_is_refused(small):
    g = Graph()
    y = g.add("matmul", [g.tensor("f32[16,20]"), g.tensor("f32[20,16]")])
    group = g.group(g.add("add", [y, g.transpose(y, 1, 0)]))
    found = PRODUCT.offer(group, small)
    assert isinstance(found, Refusal) and "order" in found.reason


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_travels(small, rng, bad):
    group = product("f32[17,9]", "f32[9,40]")
    for offer in PRODUCT.offer(group, small):
        a, b = (rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types)
        a[3, 2] = b[4, 7] = bad
        (found,) = run_cuda_kernel(PRODUCT.build(group, offer, small), group, offer, [a, b])
        with np.errstate(invalid="ignore"):
            assert_same(found, a.astype(np.float64) @ b.astype(np.float64), terms=9)


def test_guarded_weights_that_are_no_numbers_are_zero(small, rng):
    group = attention(1, 16, 70, 16, 16, True, guarded=True)
    provider = TritonAttentionProvider()
    mask = next(i for i, t in enumerate(group.input_types) if t.shape == (1, 1, 70))
    inputs = [rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types]
    for place, bad in ((slice(None), -np.inf), (3, np.nan), (69, np.nan), (40, np.inf)):
        inputs[mask][...] = 0
        inputs[mask][..., place] = bad
        for offer in provider.offer(group, small):
            kernel = provider.build(group, offer, small)
            (found,) = run_cuda_kernel(kernel, group, offer, inputs)
            assert not found.any()


def test_masked_keys_have_no_weight_and_rows_without_keys_are_nan(small, rng):
    group = attention(1, 16, 70, 16, 16, True)
    provider = TritonAttentionProvider()
    mask = next(i for i, t in enumerate(group.input_types) if t.shape == (1, 1, 70))
    for offer in provider.offer(group, small):
        inputs = [rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types]
        inputs[mask][..., :40] = -np.inf
        kernel = provider.build(group, offer, small)
        (found,) = run_cuda_kernel(kernel, group, offer, inputs)
        assert np.isfinite(found).all()
        inputs[mask][...] = -np.inf
        (found,) = run_cuda_kernel(kernel, group, offer, inputs)
        assert np.isnan(found).all()


def test_strict_plans_multiply_float32_as_it_is(small):
    group = product("f32[64,64]", "f32[64,64]")
    variants = [[o.variant for o in PRODUCT.offer(group, replace(small, allow_split=on))] for on in (True, False)]
    assert any("split" in variant for variant in variants[0])
    assert not any("split" in variant for variant in variants[1])


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_sum_is_rounded_only_where_16_bits_are_needed(small, rng, is_stored):
    g = Graph()
    y = g.add("matmul", [g.tensor("f16[40,64]"), g.tensor("f16[64,24]")])
    group = g.group(*((y,) if is_stored else ()), g.add("tanh", [g.cast(y, "f32")]))
    for _, _, kernel in check_cuda_offers(PRODUCT, [group], small, rng):
        assert (".to(tl.float16).to(tl.float32)" in kernel.launches[-1].source) is is_stored


def test_scores_are_not_rounded_before_a_softmax_in_float32(small):
    group, provider = ATTENTIONS["products of float16"](), TritonAttentionProvider()
    for offer in provider.offer(group, small):
        (launch,) = provider.build(group, offer, small).launches
        assert launch.source.count(".to(tl.float16).to(tl.float32)") == 1, "only weights are"


@pytest.mark.parametrize("name", ["matrices", "many terms", "stem"])
def test_factors_in_tf32_are_rounded_to_nearest(name, small, rng):
    """Matrix units cut bits off, which makes all products smaller; the interpreter multiplies what it is given."""
    body = PRODUCTS[name]().body
    body = with_tf32(body)
    group = make_group(body, range(len(body.primitives)), [value for _, value in body.outputs])
    assert sum(p.op == "round_tf32" for p in body.primitives) == 2
    device = replace(small, allow_tf32=True)
    inputs = random_arrays(rng, group.input_types)
    feeds = {name: a for (name, _), a in zip(group.body.inputs, inputs, strict=True)}
    expected = reference.run(PRODUCTS[name]().body, feeds, exact=False, factors=ROUNDED_FACTORS["tf32"])
    blocked = [offer for offer in PRODUCT.offer(group, device) if offer.variant != "direct"]
    assert blocked and all("tf32" in offer.variant for offer in blocked)
    for offer in blocked:
        kernel = PRODUCT.build(group, offer, device)
        if not isinstance(kernel, Refusal):
            (found,) = run_cuda_kernel(kernel, group, offer, inputs)
            np.testing.assert_allclose(found, expected["o0"], rtol=1e-5, atol=1e-5 * np.abs(expected["o0"]).max())


def test_weights_in_tf32_are_stored_with_adjacent_terms(small, rng):
    group = product("f32[9,24]", "f32[24,40]")
    target = replace(small, allow_tf32=True)
    fixed = replace(group, constant_inputs=frozenset({1}))
    assert {str(offer.inputs[1]) for offer in PRODUCT.offer(group, target)} == {"ab"}
    assert {str(offer.inputs[1]) for offer in PRODUCT.offer(fixed, small)} == {"ab"}
    found = check_cuda_offers(PRODUCT, [fixed], target, rng)
    assert {str(offer.inputs[1]) for _, offer, _ in found if "tf32" in offer.variant} == {"ba"}


def test_attention_in_tf32_rounds_its_weights(small):
    body = with_tf32(ATTENTIONS["masked"]().body)
    group = make_group(body, range(len(body.primitives)), [value for _, value in body.outputs])
    target, provider = replace(small, allow_tf32=True), TritonAttentionProvider()
    for offer in provider.offer(group, target):
        (launch,) = provider.build(group, offer, target).launches
        assert launch.source.count("f.as_tf32(") == 4, "queries, keys, weights and values"


@pytest.mark.parametrize("strict", [False, True])
def test_winograd_rounds_no_factors(strict, whole):
    target = replace(whole, allow_tf32=True, allow_split=not strict)
    offers = [o for name in WINOGRADS for o in TritonWinogradProvider().offer(WINOGRADS[name](), target)]
    assert offers and not [offer for offer in offers if "tf32" in offer.variant]


@pytest.mark.parametrize("least", [np.finfo(np.float32).min, -1e38, -1e30, 1e30, 3e38])
def test_rows_of_equal_scores_have_equal_weights_however_large_they_are(small, rng, least):
    """Masks often add the smallest number; a row without other keys is then a mean of all."""
    group = attention(1, 16, 70, 16, 16, True)
    provider = TritonAttentionProvider()
    mask = next(i for i, t in enumerate(group.input_types) if t.shape == (1, 1, 70))
    inputs = [rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types]
    inputs[mask][...] = least
    for offer in provider.offer(group, small):
        (found,) = run_cuda_kernel(provider.build(group, offer, small), group, offer, inputs)
        mean = inputs[-1].mean(axis=1, dtype=np.float64)
        np.testing.assert_allclose(found, np.broadcast_to(mean, found.shape), rtol=1e-4, atol=1e-5)


def test_weights_of_large_scores_are_as_exact_as_these(small, rng):
    group, provider = attention(1, 16, 70, 16, 16, True), TritonAttentionProvider()
    inputs = [(30 * rng.standard_normal(t.shape)).astype(np.float32) for t in group.input_types]
    feeds = {name: a for (name, _), a in zip(group.body.inputs, inputs, strict=True)}
    wide, own = (reference.run(group.body, feeds, exact=exact)["o0"] for exact in (True, False))
    for offer in provider.offer(group, small):
        (found,) = run_cuda_kernel(provider.build(group, offer, small), group, offer, inputs)
        assert np.abs(found - wide).max() <= 4 * np.abs(own - wide).max()


def test_only_maxima_are_subtracted_without_a_limit(small, rng):
    """An exponential of the same form that the model has keeps its minimum."""
    g = Graph()
    y = g.add("matmul", [g.tensor("f32[40,16]"), g.tensor("f32[16,40]")])
    below = g.add("min", [g.add("sub", [y, g.wide(g.tensor("f32[40]"), (40, 40))]), g.number(y, 0.0)])
    for _, _, kernel in check_cuda_offers(PRODUCT, [g.group(g.add("exp", [below]))], small, rng):
        assert "f.exp_of_nonpositive" in kernel.launches[-1].source


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_the_last_program_of_a_tile_adds_up_its_parts(kind, whole, rng):
    g = Graph()
    y = g.add("matmul", [g.tensor(f"{kind}[2,40,500]"), g.tensor(f"{kind}[2,500,33]")])
    found = check_cuda_offers(PRODUCT, [g.group(g.add("tanh", [y]))], whole, rng)
    joined = [(group, offer, kernel) for group, offer, kernel in found if "q" in offer.variant.split(" ")[0]]
    for group, offer, kernel in joined:
        (launch,) = kernel.launches
        assert launch.grid == math.prod((int(offer.variant.split(" ")[0].split("q")[1]), len(kernel.tables[0])))
        arrays = [layout.pack(a) for layout, a in zip(offer.inputs, random_arrays(rng, group.input_types), strict=True)]
        arrays += [np.zeros(group.output_types[0].shape, group.output_types[0].dtype.numpy)]
        arrays += [np.full(size, np.nan, dtype.numpy) for dtype, size in kernel.scratch]
        arrays += [np.array(table, np.int32) for table in kernel.tables]
        memory = [Memory(array.reshape(-1)) for array in arrays]
        results = []
        for _ in range(2):  # the counters are 0 again after a run
            run_launches([launch], [[memory[i] for i in launch.arguments]])
            assert not arrays[-1].any()
            results.append(arrays[2].copy())
            arrays[2][...] = 0
        np.testing.assert_array_equal(*results)
        assert results[0].any()
    assert joined


@pytest.mark.parametrize(
    "group",
    [
        conv("f32[2,6,9,7]", "f32[6,1,3,3]", (2, 1), (1, 0), (0, 2), (1, 2), groups=6, tail=False),
        conv("f32[1,6,11,5]", "f32[6,1,3,3]", (1, 1), (1, 1), (1, 1), groups=6, tail=True),
        conv("f16[1,8,9,6]", "f16[8,1,5,3]", (1, 1), (2, 1), (2, 1), groups=8),
        conv("f32[3,8,9]", "f32[8,1,3]", (1,), (1,), (1,), (1,), groups=8),
    ],
    ids=["asymmetric", "tail", "float16", "one axis"],
)
def test_depthwise_rows_side_by_side(group, small, rng):
    weights = next(i for i, t in enumerate(group.input_types) if t.shape[1:2] == (1,) and max(t.shape[2:]) > 1)
    found = check_cuda_offers(PRODUCT, [replace(group, constant_inputs=frozenset({weights}))], small, rng)
    counts = {offer.variant.split(" ")[1] for _, offer, _ in found if " of " in offer.variant}
    assert counts >= {"2", "4"}
    layouts = {str(o.inputs[weights]) for _, o, _ in found if " of " in o.variant and not o.inputs[0].is_plain}
    assert group.input_types[0].rank == 3 or layouts == {"cdba"}


@pytest.mark.parametrize("rows", [150, 160])
def test_the_last_wave_is_split(rows, small, rng):
    g = Graph()
    y = g.add("matmul", [g.tensor(f"f32[{rows},523]"), g.tensor("f32[523,33]")])
    target = replace(small, processors=7, shared_bytes=40 << 10)
    group = g.group(g.add("max", [y, g.number(y, 0.0)]))
    for tile in (ProgramTile(16, 32, 32, 1, 3), ProgramTile(16, 16, 32, 1, 3, product=Product.SPLIT)):
        split = with_split_tail((1, rows, 33, 523), tile, DType.F32, target)
        assert split is not None and split.whole > 0 and ProgramTile.parse(str(split)) == split
        offer = replace(PRODUCT.offer(group, target)[0], variant=str(split))
        kernel = PRODUCT.build(group, offer, target)
        first, last = kernel.launches
        assert first.grid == split.whole * -(-33 // tile.columns) and last.grid % split.parts == 0
        inputs = random_arrays(rng, group.input_types)
        compare(group, inputs, run_cuda_kernel(kernel, group, offer, inputs))


def test_a_full_last_wave_is_not_split(whole):
    tile = ProgramTile(128, 256, 64, 8, 3, product=Product.F16)
    assert str(with_split_tail((1, 2048, 3072, 768), tile, DType.F16, whole)) == "128x256x64w8s3q2t11 f16"
    for sizes in ((1, 1408, 3072, 768), (1, 2816, 3072, 768), (2, 2048, 3072, 768), (1, 2048, 3072, 64)):
        assert with_split_tail(sizes, tile, DType.F16, whole) is None
