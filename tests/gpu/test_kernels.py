"""Generated kernels and library calls on the device, compared with the reference in float64."""

from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Refusal
from korch.provider.torch_library import TorchProvider
from korch.provider.triton import TritonAttentionProvider, TritonProductProvider, TritonProvider, TritonWinogradProvider
from korch.testing.kernels import compare
from korch.testing.samples import random_arrays
from tests.cuda import cuda_groups as groups
from tests.support.cuda_device import run_on_device
from tests.tile.tile_groups import FAMILIES, random_groups


def check(provider, group, target, compiler, rng, least=1):
    offers = provider.offer(group, target)
    assert not isinstance(offers, Refusal), offers
    checked = 0
    for offer in offers:
        kernel = provider.build(group, offer, target)
        if isinstance(kernel, Refusal):
            continue
        inputs = random_arrays(rng, group.input_types)
        found = run_on_device(kernel, group, offer, inputs, compiler)
        try:
            compare(group, inputs, found)
        except AssertionError as error:
            raise AssertionError(f"{error}; {offer}") from error
        checked += 1
    assert checked >= least


@pytest.mark.parametrize("family", FAMILIES)
def test_fused(family, target, compiler, rng):
    for group in FAMILIES[family]():
        check(TritonProvider(), group, target, compiler, rng)


@pytest.mark.parametrize("seed", range(3))
def test_random_groups(seed, target, compiler):
    rng = np.random.default_rng(seed)
    for group in random_groups(rng, 15, 12):
        if not isinstance(TritonProvider().offer(group, target), Refusal):
            check(TritonProvider(), group, target, compiler, rng)


@pytest.mark.parametrize("name", groups.PRODUCTS)
def test_products(name, target, compiler, rng):
    check(TritonProductProvider(), groups.PRODUCTS[name](), target, compiler, rng)


@pytest.mark.parametrize(
    "group",
    [
        groups.product("f16[1,4096]", "f16[4096,520]"),
        groups.product("f32[3,4096]", "f32[4096,520]"),
        groups.product("f16[128,768]", "f16[768,768]"),
        groups.product("f16[2048,768]", "f16[768,3072]"),
        groups.conv("f16[2,64,57,55]", "f16[64,1,3,3]", (1, 1), (1, 1), (1, 1), groups=64),
    ],
    ids=["one row", "few rows", "parts", "last wave", "depthwise"],
)
def test_variants_with_constant_weights(group, target, compiler, rng):
    check(TritonProductProvider(), replace(group, constant_inputs=frozenset({1})), target, compiler, rng, least=5)


@pytest.mark.parametrize("name", [n for n in groups.PRODUCTS if n in groups.IN_LIBRARY])
def test_library(name, target, compiler, rng):
    check(TorchProvider(), groups.PRODUCTS[name](), target, compiler, rng)


@pytest.mark.parametrize("name", ["matrices", "stem", "pointwise", "fused product", "float16"])
def test_engines_of_tensorrt(name, target, compiler, rng):
    pytest.importorskip("tensorrt")
    from korch.provider.tensorrt import TensorRTProvider

    group = replace(groups.PRODUCTS[name](), constant_inputs=frozenset({1}))
    check(TensorRTProvider(), group, replace(target, is_nominal=False), compiler, rng)


@pytest.mark.parametrize("name", groups.ATTENTIONS)
def test_attention(name, target, compiler, rng):
    check(TritonAttentionProvider(), groups.ATTENTIONS[name](), target, compiler, rng)


@pytest.mark.parametrize("name", groups.WINOGRADS)
def test_winograd(name, target, compiler, rng):
    check(TritonWinogradProvider(), groups.WINOGRADS[name](), target, compiler, rng)
