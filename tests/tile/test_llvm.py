"""Tile programs printed as LLVM IR compute the same as the primitives."""

import numpy as np
import pytest

from korch.measure.compiler import Builder, is_llvm
from korch.provider.generated import GeneratedProvider
from korch.provider.tile_kernel import llvm_kernel
from korch.target import LANES, Target
from korch.testing.kernels import check_offers
from korch.tile.ir.parse import parse_program
from korch.tile.llvm.isa import ISAS
from korch.tile.llvm.print import print_llvm, refusal
from korch.tile.lower.staging import Machine
from tests.tile.test_cpp import check_specials
from tests.tile.tile_groups import FAMILIES, random_groups


class LlvmProvider(GeneratedProvider):
    """Prints the programs of generated kernels as LLVM IR."""

    def build(self, group, offer, target):
        """Lower and print the group."""
        program = self.program(group, offer, Machine.of(target))
        kernel = llvm_kernel(program, print_llvm(program, group.text, target))
        assert is_llvm(kernel.source)
        return kernel


PROVIDER = LlvmProvider()


@pytest.fixture(scope="module")
def own_target(target):
    if target.isa not in ISAS:
        pytest.skip(f"{target.isa} is not printed yet")
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_known_groups(family, own_target, builder, rng):
    assert len(check_offers(PROVIDER, list(FAMILIES[family]()), own_target, builder, rng)) >= 6


@pytest.mark.parametrize("seed", range(2))
def test_random_groups(seed, own_target, builder):
    rng = np.random.default_rng(seed)
    groups = list(random_groups(rng, 12, 14))
    check_offers(PROVIDER, groups, own_target, builder, rng)
    check_specials(groups, own_target, builder, rng, PROVIDER)


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_other_instruction_sets(isa, own_target, rng, tmp_path):
    """Narrower registers take other vector widths and tails (this machine runs them too)."""
    if own_target.lanes != 16:
        pytest.skip("this machine runs no other instruction set")
    other = Target(isa=isa, lanes=LANES[isa])
    groups = [g for family in FAMILIES.values() for g in family()][::4]
    check_offers(PROVIDER, groups, other, Builder(isa, tmp_path), rng)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("parameter n: 1..4\nbuffer i: input f32[4]\nbuffer o: output f32[4]\nstage\n", "parameters"),
        ("buffer i: input f32[4] panels(4, 4)\nbuffer o: output f32[4]\nstage\n", "the layout of buffer i"),
    ],
)
def test_what_is_not_printed_yet(text, reason):
    assert refusal(parse_program(text), Target()) == reason
