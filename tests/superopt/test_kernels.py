"""Found programs are offered, printed, compiled and compared with the reference."""

from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal
from korch.measure.compiler import Builder
from korch.primitive.ops.layout import ReshapeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.provider.generated import GeneratedProvider
from korch.superopt.find import DEFAULT_EFFORT, Effort
from korch.superopt.groups import superopt_groups
from korch.superopt.provider import SuperoptProvider
from korch.superopt.sizes import CacheMachine
from korch.system.deadline import Deadline
from korch.target import Target, detect_target
from korch.testing.kernels import check_kernel, load_kernels
from tests.superopt.test_find import group_of
from tests.support import blocks
from tests.support.facts import Facts

SIZES = {
    "attention": lambda: blocks.attention(2, 19, 70, 16, 24),
    "rms-norm-product": lambda: blocks.rms_norm_product(13, 130, 65),
    "lora": lambda: blocks.lora(1, 96, 80, 4),
    "gated-mlp": lambda: blocks.gated_mlp(7, 96, 190),
}
"""Odd sizes: blocks that are not full, rows of fewer elements than a vector."""


@pytest.fixture(scope="module")
def target() -> Target:
    return detect_target(2, "gcc")


def provider_for(target: Target, effort: Effort = DEFAULT_EFFORT) -> SuperoptProvider:
    return SuperoptProvider(Facts(), CacheMachine(target.lanes, 2, target.l2_bytes), effort)


def offers_of(provider: SuperoptProvider, group: Group, target: Target) -> list[Offer]:
    """Return the offers of a group, after a search for it."""
    provider.search([group], lambda kind, question, ask: ask(), Deadline())
    offers = provider.offer(group, target)
    assert not isinstance(offers, Refusal), offers.reason
    return [*offers]


def test_kernels_of_found_programs(target, tmp_path):
    provider, builder, made = provider_for(target), Builder(target.isa, tmp_path), []
    for name, make in SIZES.items():
        graph = make()
        weights = frozenset(i for i, (n, _) in enumerate(graph.inputs) if n in ("w", "v", "a", "b"))
        group = replace(group_of(graph), constant_inputs=weights if name in ("lora", "gated-mlp") else frozenset())
        offers = offers_of(provider, group, target)
        if name == "gated-mlp":  # 7 rows are 4 and 3, each with three vectors of a panel
            assert {columns for _, columns in provider.found(group, offers[0]).packed} == {3 * target.lanes}
        for offer in (offers[0], offers[-1]):
            kernel = provider.build(group, offer, target)
            assert not isinstance(kernel, Refusal)
            made.append((kernel, group, offer))
    library, rng = load_kernels([kernel for kernel, _, _ in made], builder), np.random.default_rng(2)
    for kernel, group, offer in made:
        inputs = [rng.standard_normal(type_.shape).astype(np.float32) for type_ in group.input_types]
        check_kernel(kernel, group, offer, inputs, builder, library)


@pytest.mark.parametrize("lanes", [8, 16])
def test_packed_columns_of_a_task_are_whole_panels(target, lanes):
    """All cuts are printed, also those whose columns are no multiple of a panel: these read what is not packed."""
    effort = Effort(cuts=40, worth=1e9, graphs=1, programs=40)
    group = replace(group_of(blocks.lora(8, 64, 1056, 8)), constant_inputs=frozenset((1, 2, 3)))
    other = replace(target, lanes=lanes)
    provider = provider_for(other, effort)
    for offer in offers_of(provider, group, other):
        assert not isinstance(provider.build(group, offer, other), Refusal)
    found = provider.find(group).programs
    assert {columns // lanes for program in found for _, columns in program.packed} == {2, 3}


def test_scores_that_are_masked_have_no_share(target, tmp_path):
    """A block of keys whose scores all are -inf leaves no trace."""
    b = blocks.Block()
    s, v = b.tensor("s", 5, 96), b.tensor("v", 96, 16)
    group = group_of(b.result(b.add("matmul", (b.softmax(s), v))))
    provider, builder, rng = provider_for(target), Builder(target.isa, tmp_path), np.random.default_rng(4)
    scores = rng.standard_normal((5, 96)).astype(np.float32)
    scores[:, :64] = -np.inf
    offers = [offer for offer in offers_of(provider, group, target) if "rescale" in provider.found(group, offer).text]
    assert offers
    for offer in offers[-1:]:
        kernel = provider.build(group, offer, target)
        check_kernel(kernel, group, offer, [scores, rng.standard_normal((96, 16)).astype(np.float32)], builder)


def test_what_the_provider_leaves_to_others(target):
    b = blocks.Block()
    group = group_of(b.result(b.add("matmul", (b.tensor("x", 4, 6), b.tensor("w", 6, 5)))))
    refusal = provider_for(target).offer(group, target)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "it was not searched"
    assert GeneratedProvider().offer(group, target) == Refusal("matmul is not generated")


def test_a_group_ends_at_a_convolution():
    b = blocks.Block()
    x = b.add("conv", (b.tensor("x", 1, 4, 8), b.tensor("k", 4, 4, 1)), ConvAttributes((1,), (0,), (0,), (1,)))
    y = b.add("matmul", (b.add("reshape", (x,), ReshapeAttributes((4, 8))), b.tensor("w", 8, 8)))
    (group,) = {
        group.key: group for group in superopt_groups(b.result(b.add("matmul", (y, b.tensor("v", 8, 6)))))
    }.values()
    assert [primitive.op for primitive in group.body.primitives] == ["reshape", "matmul", "matmul"]


def test_groups():
    """A group has a product and what normalizes it, two products or two reductions; copies share a reduction."""
    for name, make in blocks.BLOCKS.items():
        graph = make()
        found = {len(group.primitives) for group in superopt_groups(graph)}
        fewer = superopt_groups(graph, max(found) - 1)
        assert {len(group.primitives) for group in fewer} < found
        assert max(found) == len(graph.primitives), name
