"""Kernels of each generator for other instruction sets: run with AVX2 and without, built for NEON.

The same template generates all of them, with different numbers of lanes. So the tests cover loop tails,
blocks for fewer registers, and operations that an instruction set lacks.
"""

import re
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal
from korch.measure.compiler import Builder
from korch.primitive.ops.layout import PadAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.ops.winograd import WinogradAttributes, transform_weights
from korch.provider.attention import AttentionProvider
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider
from korch.provider.winograd import WinogradProvider
from korch.target import LANES, Target
from korch.testing.kernels import check_offers
from tests.provider.linear_groups import Graph
from tests.support.emulated import Emulated, missing_commands
from tests.support.fuzz_kernels import MIXED, PLAIN, run_round
from tests.support.matrix_units import EmulatedUnits


def normalized(n: int) -> list[Group]:
    """A softmax over rows that are no whole vectors."""
    g = Graph()
    x = g.tensor(3, 2 * n + 3)
    axes, wide = ReduceAttributes((1,)), BroadcastAttributes(g.type(x).shape)
    top = g.add("broadcast", [g.add("reduce_max", [x], axes)], wide)
    power = g.add("exp", [g.add("sub", [x, top])])
    total = g.add("broadcast", [g.add("reduce_sum", [power], axes)], wide)
    return [g.group(g.add("div", [power, total]))]


def products(n: int) -> list[Group]:
    """Whole tiles and tails, with a bias and a sigmoid."""
    groups = []
    for m, k, columns in ((29, 20, 3 * n), (7, 5, n + 3), (1, 9, 2 * n)):
        g = Graph()
        y = g.add("matmul", [g.tensor(m, k), g.weights(k, columns)])
        groups.append(g.group(g.add("sigmoid", [g.with_tensor("add", y, g.weights(1, columns))])))
    return groups


def convolved(n: int) -> list[Group]:
    """Dense convolutions of stride 2, and depthwise ones."""
    dense = Graph()
    x = dense.tensor(1, n + 3, 9, 7)
    steps = ConvAttributes((2, 2), (1, 1), (1, 1), (1, 1), 1)
    first = dense.group(dense.add("conv", [x, dense.weights(5, n + 3, 3, 3)], steps))
    wide = Graph()
    x = wide.tensor(1, 2 * n, 13, 14)
    other = wide.group(wide.add("conv", [x, wide.weights(4 * n - 5, 2 * n, 3, 3)], steps))
    g = Graph()
    x = g.tensor(1, n, 9, 7)
    each = ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1), n)
    y = g.add("conv", [x, g.weights(n, 1, 3, 3)], each)
    second = g.group(y)
    third = g.group(g.add("sigmoid", [y]))
    return [first, other, second, third]


def in_winograds_space(n: int) -> list[Group]:
    """Tiles of 2 and of 4, with borders, and channels enough for matrix units."""
    groups = []
    for tile, channels in ((2, n), (4, n), (2, 4 * n)):
        g = Graph()
        pads = PadAttributes((0, 0, 1, 1), (0, 0, 1, 1))
        weights = transform_weights(g.rng.standard_normal((channels, channels, 3, 3)), tile)
        x = g.add("pad", [g.tensor(1, channels, 7, 9)], pads)
        u = g.constant(np.ascontiguousarray(weights.astype(np.float32)))
        groups.append(g.group(g.add("winograd", [x, u], WinogradAttributes(tile, (0, 0), (0, 0)))))
    return groups


def attended(n: int) -> list[Group]:
    """Scores that are no whole vectors."""
    g = Graph()
    q, k, v = g.tensor(2, 9, n), g.tensor(2, n, n + 5), g.tensor(2, n + 5, n)
    s = g.add("matmul", [q, k])
    axes, wide = ReduceAttributes((2,)), BroadcastAttributes(g.type(s).shape)
    top = g.add("broadcast", [g.add("reduce_max", [s], axes)], wide)
    power = g.add("exp", [g.add("sub", [s, top])])
    total = g.add("broadcast", [g.add("reduce_sum", [power], axes)], wide)
    return [g.group(g.add("matmul", [g.add("div", [power, total]), v]))]


FAMILIES = {
    "generated": (GeneratedProvider, normalized),
    "gemm": (GemmProvider, products),
    "conv": (ConvProvider, convolved),
    "winograd": (WinogradProvider, in_winograds_space),
    "attention": (AttentionProvider, attended),
}
ENTRIES = pytest.mark.parametrize(("provider", "groups"), FAMILIES.values(), ids=list(FAMILIES))
Groups = Callable[[int], list[Group]]


@ENTRIES
@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_lesser_sets_of_this_machine(isa, provider, groups: Groups, target, rng, tmp_path):
    if target.lanes < LANES["avx2"]:
        pytest.skip("this machine runs no other instruction set")
    lanes = LANES[isa]
    other = Target(isa=isa, lanes=lanes, threads=2)
    assert check_offers(provider(), groups(lanes), other, Builder(isa, tmp_path), rng)


@ENTRIES
def test_matrix_units_in_software(provider, groups: Groups, target, rng, tmp_path):
    if target.lanes != LANES["amx"]:
        pytest.skip("this machine has no vectors of 512 bits")
    builder = EmulatedUnits("amx", tmp_path)
    other = Target(isa="amx", lanes=target.lanes, threads=2, l2_bytes=64 << 10)
    assert check_offers(provider(), groups(target.lanes), other, builder, rng)


def _assembly_of(text: str) -> str:
    """Return the assembly of a module of LLVM IR."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_triple(module.triple).create_target_machine(opt=2, reloc="pic")
    return str(machine.emit_assembly(module))


def _assemble(provider, groups: list[Group], target: Target) -> list[str]:
    """Return the assembly of all kernels that a provider offers for some groups."""
    texts = []
    for group in groups:
        offers = provider().offer(group, target)
        assert not isinstance(offers, Refusal), offers.reason
        for offer in offers:
            kernel = provider().build(group, offer, target)
            assert not isinstance(kernel, Refusal), kernel.reason
            texts.append(_assembly_of(kernel.source))
    return texts


@ENTRIES
def test_kernels_compile_to_neon(provider, groups: Groups):
    target = Target(isa="neon", lanes=LANES["neon"], threads=2)
    texts = _assemble(provider, groups(target.lanes), target)
    assert texts
    for text in texts:  # four lanes at once, with one rounding for product and sum
        assert re.search(r"\bfml[as]\s+v\d+\.4s", text)


@ENTRIES
def test_kernels_run_on_neon(provider, groups: Groups, rng, tmp_path: Path):
    if missing := missing_commands():
        pytest.skip(f"{' and '.join(missing)} missing (Debian: qemu-user)")
    target = Target(isa="neon", lanes=LANES["neon"], threads=2)
    assert check_offers(provider(), groups(target.lanes), target, Emulated(tmp_path), rng)


@pytest.mark.parametrize(("isa", "dtypes"), [("neon", PLAIN[:1]), ("neon_dot", MIXED[2:3]), ("neon_bf16", PLAIN[2:3])])
def test_random_groups_agree_on_neon(isa, dtypes, tmp_path: Path):
    if missing := missing_commands():
        pytest.skip(f"{' and '.join(missing)} missing (Debian: qemu-user)")
    target = Target(isa=isa, lanes=LANES[isa], threads=2)
    checked, findings = run_round(0, 0, target, Emulated(tmp_path), dtypes=dtypes)
    assert checked > 0 and findings == []
