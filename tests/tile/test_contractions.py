"""Printed programs of products and convolutions compute the same as their groups."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, make_group
from korch.candidate.layout import Layout
from korch.errors import InvalidGraphError
from korch.measure.compiler import Builder
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import printed_kernel
from korch.target import LANES, Target
from korch.testing.kernels import compare, load_kernels, run_kernel
from korch.testing.samples import random_arrays
from korch.tile.analysis.stages import LARGEST_ARRAY_BYTES, SERIAL_POINTS
from korch.tile.check.arithmetic import Float64
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.index import constant, quotient, var
from korch.tile.ir.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Literal,
    Loop,
    Pass,
    Product,
    Step,
    Store,
    TileProgram,
)
from korch.tile.llvm.print import print_llvm, refusal
from korch.tile.lower.staging import Machine
from tests.support.blocked_products import products

CHOSEN, FEW = 4, 2
"""Programs of a group that are compiled; and fewer where another test compiles as many with other types."""

UNEQUAL = "in equal steps"


def group_of(g: GraphBuilder, value: int) -> Group:
    g.output("o0", value)
    graph = g.freeze()
    return make_group(graph, range(len(graph.primitives)), [value])


def matmul(a: str, b: str, is_computed: bool = False) -> Group:
    """A product with a bias; its first operand may be computed."""
    g = GraphBuilder()
    x, w = g.input("x0", ValueType.parse(a)), g.input("x1", ValueType.parse(b))
    x = g.add("neg", [x]) if is_computed else x
    y = g.add("matmul", [x, w])
    kind = a[: a.index("[")]
    bias = g.input("x2", ValueType.parse(f"{kind}[{g.type(y).shape[-1]}]"))
    return group_of(g, g.add("add", [y, g.add("broadcast", [bias], BroadcastAttributes(g.type(y).shape))]))


def conv(x: str, w: str, strides, pads, dilations, groups=1) -> Group:
    """A convolution whose negative is taken."""
    g = GraphBuilder()
    image, weights = g.input("x0", ValueType.parse(x)), g.input("x1", ValueType.parse(w))
    attributes = ConvAttributes(strides, pads, pads, dilations, groups)
    return group_of(g, g.add("neg", [g.add("conv", [image, weights], attributes)]))


def groups_of(kind: str) -> dict[str, Group]:
    return {
        "odd": matmul(f"{kind}[29,67]", f"{kind}[67,21]"),
        "one of all": matmul(f"{kind}[1,1]", f"{kind}[1,1]"),
        "one row": matmul(f"{kind}[1,70]", f"{kind}[70,33]"),
        "one column": matmul(f"{kind}[9,70]", f"{kind}[70,1]"),
        "batches, computed": matmul(f"{kind}[2,3,7,5]", f"{kind}[1,1,5,37]", is_computed=True),
        "large": matmul(f"{kind}[101,530]", f"{kind}[530,139]"),
        "strided": conv(f"{kind}[2,3,9,8]", f"{kind}[5,3,3,3]", (2, 1), (1, 1), (1, 1)),
        "dilated": conv(f"{kind}[1,3,9,9]", f"{kind}[4,3,3,3]", (1, 2), (2, 0), (2, 1)),
        "groups": conv(f"{kind}[1,6,5,5]", f"{kind}[9,2,3,3]", (1, 1), (1, 1), (1, 1), 3),
        "depthwise": conv(f"{kind}[1,5,6,7]", f"{kind}[5,1,3,3]", (1, 1), (1, 1), (1, 1), 5),
        "unpadded": conv(f"{kind}[1,3,9,9]", f"{kind}[4,3,3,3]", (1, 1), (0, 0), (1, 1)),
        "one axis": conv(f"{kind}[2,4,19]", f"{kind}[6,2,3]", (2,), (1,), (1,), 2),
        "three axes": conv(f"{kind}[1,3,5,6,4]", f"{kind}[4,3,2,3,2]", (1, 1, 1), (1, 0, 1), (1, 1, 1)),
    }


def kernels_of(group: Group, target: Target, most: int) -> tuple[Offer, list[Kernel]]:
    """Return kernels of some blockings."""
    layouts = tuple(tuple(Layout.plain(t.rank) for t in types) for types in (group.input_types, group.output_types))
    found = []
    programs = products(group, group.body.linear[0], layouts, Machine.of(target))
    for program in programs[:: max(1, len(programs) // most) | 1]:
        if not refusal(program, target):
            found.append(printed_kernel(program, print_llvm(program, "", target)))
    assert found
    return Offer(*layouts), found


def check(groups, target: Target, builder: Builder, rng, most: int = FEW) -> None:
    """Compare all kernels of some groups with the reference, with and without a NaN and an infinity."""
    todo = [(group, *kernels_of(group, target, most)) for group in groups]
    library = load_kernels([kernel for *_, kernels in todo for kernel in dict.fromkeys(kernels)], builder)
    for (group, offer, kernels), specials in itertools.product(todo, (False, True)):
        inputs = random_arrays(rng, group.input_types)
        if specials:
            for array, number in zip(inputs, (np.nan, np.inf), strict=False):
                array.reshape(-1)[array.size // 2] = number
        for kernel in kernels:
            with np.errstate(all="ignore"):
                compare(group, inputs, run_kernel(kernel, group, offer, inputs, builder, library=library))


@pytest.mark.parametrize("threads", [1, 2])
def test_products_and_convolutions(threads, target, builder, rng):
    own, found = Target(isa=target.isa, lanes=target.lanes, threads=threads), groups_of("f32")
    names = found if threads > 1 else ("one row", "batches, computed", "large", "dilated", "three axes")
    check([found[name] for name in names], own, builder, rng, CHOSEN if threads > 1 else FEW)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sixteen_bits(kind, target, builder, rng):
    found = groups_of(kind)
    check([found[name] for name in ("odd", "batches, computed", "large", "strided", "groups")], target, builder, rng)


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_other_instruction_sets(isa, target, rng, tmp_path):
    if target.lanes != LANES["avx512"]:
        pytest.skip("this machine runs no other instruction set")
    other = Target(isa=isa, lanes=LANES[isa], threads=2)
    check([*groups_of("f16").values()][:8], other, Builder(isa, tmp_path), rng)


def test_large_tiles_are_in_the_workspace_of_each_thread():
    group = groups_of("f32")["large"]
    layouts = tuple(tuple(Layout.plain(t.rank) for t in types) for types in (group.input_types, group.output_types))
    for program in products(group, group.body.linear[0], layouts, Machine(16, 2)):
        assert sum(stage.work for stage in program.stages) >= SERIAL_POINTS
        targets = [Target(isa="avx512", lanes=16, threads=threads) for threads in (1, 2, 3)]
        printed = [print_llvm(program, "", target) for target in targets]
        large = [b.size * 4 for b in program.buffers if b.level.value == "tile" and b.size * 4 > LARGEST_ARRAY_BYTES]
        for threads, one in enumerate(printed, 1):
            assert one.workspace_bytes == threads * sum(-(-size // 64) * 64 for size in large)
            assert (f"@korch_region(i32 {threads}, " in one.source) == bool(large and threads > 1)


def with_contraction(steps: Sequence[Step], **changes: object) -> tuple[Step, ...]:
    """Return steps with changes to their contractions."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Loop):
            step = replace(step, body=with_contraction(step.body, **changes))
        found.append(replace(step, **changes) if isinstance(step, Contract) else step)
    return tuple(found)


def refusals(name: str, **changes: object) -> set[str]:
    """Return why programs of a group are refused, with changes to their contractions."""
    group = groups_of("f32")[name]
    layouts = tuple(tuple(Layout.plain(t.rank) for t in types) for types in (group.input_types, group.output_types))
    found = set()

    for program in products(group, group.body.linear[0], layouts, Machine(16, 1)):
        (stage,) = program.stages
        stages = (replace(stage, steps=with_contraction(stage.steps, **changes)),)
        try:
            print_llvm(replace(program, stages=stages), "", Target(isa="avx512", lanes=16))
        except InvalidGraphError as error:
            found.add(str(error))
    return found


def rescaled(program: TileProgram) -> TileProgram:
    """Multiply the sums of each row by a number of its own before each block of terms is added."""
    (stage,) = program.stages
    (contract,) = [step for _, step in stage.leaves if isinstance(step, Contract)]
    i = contract.axes[0]
    numbers = (Literal("x0", DType.F32, -0.5),)
    fill = Pass((Axis("i", i.size),), "i", numbers, (Store("factors", var("i"), "x0"),))
    one = Pass((Axis("i", 1),), "", (Literal("x0", DType.F32, 0.75),), (Store("factors", constant(0), "x0"),))
    tile = Buffer("factors", Level.TILE, DType.F32, i.extent)
    stages = (replace(stage, steps=(fill, one, *with_contraction(stage.steps, rescale=At("factors", var("i"))))),)
    return replace(program, buffers=(*program.buffers, tile), stages=stages)


@pytest.mark.parametrize("name", ["large", "one of all", "one column"])
def test_sums_are_rescaled(name, target, builder, rng):
    group = groups_of("f32")[name]
    layouts = tuple(tuple(Layout.plain(t.rank) for t in types) for types in (group.input_types, group.output_types))
    found = products(group, group.body.linear[0], layouts, Machine.of(target))
    program = rescaled(found[len(found) // 2])
    assert check_program(program) == ()
    kernel = printed_kernel(program, print_llvm(program, "", target))
    inputs = random_arrays(rng, group.input_types)
    (result,) = run_kernel(kernel, group, Offer(*layouts), inputs, builder)
    (expected,) = run_program(program, [array.reshape(-1) for array in inputs], 0, Float64())
    np.testing.assert_allclose(result.reshape(-1), expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_printed_is_refused():
    assert refusals("odd") == set()
    (text,) = refusals("odd", product=Product.SPLIT)
    assert "a product of numbers that are not split" in text
    (text,) = refusals("odd", product=Product.TF32)
    assert "contractions by tf32 can't be printed" in text
    (text,) = refusals("odd", rescale=At("t", var("j")))
    assert "only factors of rows rescale the sums of a contraction" in text
    texts = refusals("odd", a=At("i0", quotient(var("p"), 2, {"p": (0, 66)})))
    assert texts
    assert all(UNEQUAL in text and "Pack the operand" in text for text in texts)
