"""Tile programs printed as LLVM IR compute the same as the primitives."""

import re

import numpy as np
import pytest

from korch.candidate.candidate import Refusal
from korch.measure.compiler import Builder
from korch.primitive.ops.linear import ConvAttributes
from korch.provider.attention import AttentionProvider
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider, stream_bytes
from korch.provider.tile_kernel import printed_kernel
from korch.target import LANES, Target
from korch.testing.kernels import check_kernel, check_offers, load_kernels, offers_of
from korch.testing.samples import random_arrays
from korch.tile.ir.growth import UnprintableError
from korch.tile.llvm.isa import ISAS
from korch.tile.llvm.print import MARK, print_llvm, refusal
from korch.tile.lower.staging import Machine
from tests.provider.linear_groups import Graph as LinearGraph
from tests.provider.linear_groups import conv_group
from tests.support.parse_tiles import parse_program
from tests.tile.test_ends import attention
from tests.tile.test_generated import check_specials, spans
from tests.tile.tile_groups import FAMILIES, Graph, random_groups


class LlvmProvider(GeneratedProvider):
    """Prints the programs of generated kernels as LLVM IR."""

    def build(self, group, offer, target):
        """Lower and print the group."""
        program = self.program(group, offer, Machine.of(target))
        kernel = printed_kernel(
            program, print_llvm(program, group.text, target, stream_bytes(target, self.least_stream_bytes))
        )
        assert kernel.source.startswith(MARK)
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


def test_kernels_are_printed_as_llvm_ir(own_target):
    kernels = [kernel for _, _, kernel in offers_of(GeneratedProvider(), FAMILIES["normalizations"](), own_target)]
    assert sum(kernel.source.startswith(MARK) for kernel in kernels) > 0.8 * len(kernels)


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_other_instruction_sets(isa, own_target, rng, tmp_path):
    """Narrower registers take other vector widths and tails (this machine runs them too)."""
    if own_target.lanes != 16:
        pytest.skip("this machine runs no other instruction set")
    other = Target(isa=isa, lanes=LANES[isa])
    groups = [g for family in FAMILIES.values() for g in family()][::4]
    check_offers(PROVIDER, groups, other, Builder(isa, tmp_path), rng)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "generic"])
def test_sums_on_the_stack_are_aligned_to_vectors_only(isa, own_target):
    """A vector narrower than a cache line may begin in the middle of one."""
    g, lanes = LinearGraph(), LANES[isa]
    x = g.add("matmul", [g.tensor(48, 20), g.weights(20, 4 * lanes)])
    group = g.group(g.add("erf", [g.add("exp", [x])]))
    other = Target(isa=isa, lanes=lanes)
    vector = f"<{lanes} x float>"
    found = [
        {int(n) for n in re.findall(rf"(?:store|load) {vector}.*, align (\d+)", kernel.source)}
        for *_, kernel in offers_of(GemmProvider(), [group], other)
    ]
    assert any(4 * lanes in aligned for aligned in found)
    assert max(max(aligned) for aligned in found) <= 4 * lanes


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_large_outputs_are_written_past_the_caches(isa, own_target, rng, tmp_path):
    """Groups of many kinds, as if their outputs were large: rows that begin inside of lines, too."""
    if own_target.lanes < LANES[isa]:
        pytest.skip("this machine runs no such instruction set")
    other, builder = Target(isa=isa, lanes=LANES[isa]), Builder(isa, tmp_path)
    g = Graph()
    rows = g.group(g.add("neg", [g.slice(g.tensor("f32[9,700]"), (0, 3), (9, 603), (1, 1))]))
    names = ("normalizations", "moves", "squares", "resizes", "several outputs")
    groups = [rows, *spans(), *(group for name in names for group in FAMILIES[name]())][:: 1 if isa == "avx512" else 4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.tile.test_llvm.stream_bytes", lambda *_: 0)
        checked = check_offers(PROVIDER, groups, other, builder, rng)
    assert sum("!nontemporal" in kernel.source for *_, kernel in checked) > len(checked) // 8


def contractions(n):
    """Products and convolutions of rows, columns and terms that fill no block, with steps after them."""
    groups = []
    for a, b in (((131, 20), (20, 2 * n)), ((14, 5), (5, n - 1)), ((7, 33), (33, 4 * n + 1)), ((2, 9, 8), (2, 8, 40))):
        g = LinearGraph()
        x = g.add("matmul", [g.tensor(*a), g.weights(*b) if len(a) == 2 else g.tensor(*b)])
        groups.append(g.group(g.with_number("max", x, 0.0)))
    return [*groups, conv_group((1, 20, 9, 11), (24, 20, 3, 3)), conv_group((2, 3, 12, 12), (2 * n, 3, 5, 5))]


def depthwise(x, w, stride=1, pad=0, dilation=1):
    """A depthwise convolution with steps after it."""
    g, rank = LinearGraph(), len(x) - 2
    attributes = ConvAttributes((stride,) * rank, (pad,) * rank, (pad,) * rank, (dilation,) * rank, x[1])
    return g.group(g.with_number("max", g.add("conv", [g.tensor(*x), g.weights(*w)], attributes), 0.0))


def windows():
    """Windows that reach beyond an image by less and by more than a tile, of one and of several vectors of channels."""
    return [
        depthwise((1, 40, 14, 14), (40, 1, 3, 3), pad=1),
        depthwise((2, 17, 9, 11), (17, 1, 5, 5), stride=2, pad=2),
        depthwise((1, 16, 9, 5), (16, 1, 3, 3), pad=2, dilation=3),
        depthwise((1, 5, 3, 40), (5, 1, 3, 7), pad=6),
        depthwise((1, 33, 3, 4, 5), (33, 1, 2, 3, 3), pad=1),
        depthwise((1, 8, 1, 1), (8, 1, 3, 3), pad=1),
        conv_group((1, 3, 30, 30), (20, 3, 3, 3)),
        conv_group((1, 3, 7, 7), (40, 3, 3, 3)),
    ]


@pytest.mark.parametrize(
    ("providers", "groups"),
    [
        ((GemmProvider(), ConvProvider()), contractions(16)),
        ((ConvProvider(),), windows()),
        ((AttentionProvider(),), [attention(40, 50, False), attention(3, 300, False), attention(13, 1100, True)]),
    ],
    ids=("products", "windows", "attention"),
)
def test_contractions(providers, groups, own_target, builder, rng):
    if own_target.lanes != 16:
        pytest.skip("contractions are printed for AVX-512 only")
    checked = []
    for provider in providers:
        own = [g for g in groups if not isinstance(provider.offer(g, own_target), Refusal)]
        for group, offer, kernel in offers_of(provider, own, own_target):
            if kernel.program is not None and not refusal(kernel.program, own_target):
                printed = printed_kernel(kernel.program, print_llvm(kernel.program, group.text, own_target))
                checked.append((group, offer, printed))
                assert printed.source.startswith(MARK)
    library = load_kernels([kernel for *_, kernel in checked], builder)
    for group, offer, kernel in checked:
        check_kernel(kernel, group, offer, random_arrays(rng, group.input_types), builder, library)
    assert len(checked) >= 5


def test_a_parameter_without_a_count_is_refused():
    text = "parameter n: 1..4\nbuffer i: input f32[4]\nbuffer o: output f32[4]\nstage\n"
    with pytest.raises(UnprintableError, match="parameter n is known at run time only"):
        print_llvm(parse_program(text), "", Target())


@pytest.mark.parametrize(
    ("text", "reason"),
    [("buffer i: input f32[4]\nbuffer o: output f32[4] panels(4, 4)\nstage\n", "the layout of buffer o")],
)
def test_what_is_not_printed_yet(text, reason):
    assert refusal(parse_program(text), Target()) == reason
