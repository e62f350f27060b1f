"""Every program is checked before its kernel is compiled: one that is broken on purpose is refused, in each builder."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from korch.candidate.candidate import Group, Offer, Refusal
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import ValueType
from korch.provider import tile_kernel
from korch.provider.conv import ConvProvider
from korch.provider.faults import Fault, Faults
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import Kernel
from korch.superopt.provider import SuperoptProvider
from korch.superopt.sizes import CacheMachine
from korch.system.deadline import Deadline
from korch.target import LANES, Target
from korch.tile.check.accesses import accesses
from korch.tile.check.check import check_program
from korch.tile.ir.index import Expr, substitute
from korch.tile.ir.program import Contract, Level, Loop, Pass, Step, TileProgram
from tests.provider.linear_groups import Graph
from tests.provider.test_bytes import product
from tests.provider.test_gathered import gathered
from tests.provider.test_instruction_sets import FAMILIES
from tests.provider.test_running import GROUPS as RUNNING
from tests.provider.test_stored import stored
from tests.provider.test_top import GROUPS as TOP
from tests.superopt.test_find import group_of
from tests.support import blocks
from tests.support.facts import Facts


class Searching(SuperoptProvider):
    """Searches for the programs of a group when it is asked for offers."""

    def __init__(self) -> None:
        super().__init__(Facts(), CacheMachine(16, 2, 64 << 10))

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        self.search([group], lambda kind, question, ask: ask(), Deadline())
        return super().offer(group, target)


def of_bytes(n: int) -> list[Group]:
    """Convolutions of many and of few channels, and depthwise ones."""
    groups = []
    for channels, each in ((4 * n, 1), (3, 1), (2 * n, 2 * n)):
        g = Graph()
        image = g.input("x", ValueType.parse(f"u8[1,{channels},9,11]"))
        weights = g.constant(g.rng.integers(-128, 128, (2 * n, channels // each, 3, 3)).astype("int8"))
        attributes = ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1), each)
        groups.append(g.group(g.add("conv", [image, weights], attributes)))
    return groups


BUILDERS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Group]]]] = {
    **FAMILIES,
    "stored": (GemmProvider, lambda n: [stored((m, 64), 4 * n) for m in (1, 13)]),
    "gathered": (GemmProvider, lambda n: [gathered(13, 3, 17, 65)]),
    "products of bytes": (GemmProvider, lambda n: [product((19, 64), (64, 40))]),
    "convolutions of bytes": (ConvProvider, of_bytes),
    "running sums": (GeneratedProvider, lambda n: RUNNING[:12:4]),
    "largest elements": (GeneratedProvider, lambda n: TOP[1:3]),
    "found programs": (Searching, lambda n: [group_of(blocks.lora(2, 24, 32, 4))]),
}


@pytest.mark.fault
@pytest.mark.parametrize("isa", ["generic", "avx512", "amx"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_a_program_that_is_broken_on_purpose_is_refused(
    builder: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, groups_of = BUILDERS[builder]
    target = Target(isa=isa, lanes=LANES[isa], threads=2, l2_bytes=64 << 10)
    broken, whole = Counter[str](), list[TileProgram]()
    for group in groups_of(target.lanes):
        provider = make()
        offers = provider.offer(group, target)
        for offer in () if isinstance(offers, Refusal) else offers:
            for alter in (whole.append, shorter, racing):
                changed: list[bool] = []

                def check(program: TileProgram, alter: Any = alter, changed: list[bool] = changed) -> Any:
                    altered = alter(program) or program
                    changed.append(altered != program)
                    return check_program(altered)

                monkeypatch.setattr(tile_kernel, "check_program", check)
                found = Faults().kernel(provider, group, offer, target)
                if any(changed):
                    assert isinstance(found, Fault) and "InvalidGraphError" in found.reason, alter.__name__
                    broken[alter.__name__] += 1
                else:
                    assert isinstance(found, Kernel), found
    assert whole and broken["shorter"] == len(whole)
    assert broken["racing"] or builder == "largest elements"  # each row is one task, and has one place in the output


def shorter(program: TileProgram) -> TileProgram:
    """Return a program whose outputs have one element less, so that it writes behind their ends."""
    buffers = tuple(
        replace(b, elements=b.elements - 1, layout=()) if b.level is Level.OUTPUT and isinstance(b.elements, int) else b
        for b in program.buffers
    )
    return replace(program, buffers=buffers)


def racing(program: TileProgram) -> TileProgram:
    """Return a program in whose last parallel stage all tasks along the first grid axis write the same elements."""
    outputs = {b.name for b in program.buffers if b.level is not Level.INPUT}
    for number, stage in reversed(list(enumerate(program.stages))):
        axis = next((axis for axis in stage.grid if axis.size != 1), None)
        writes = any(a.is_write and a.buffer in outputs for a in accesses(stage))
        if axis is not None and writes:
            name, stages = axis.name, list(program.stages)
            stages[number] = replace(stage, steps=tuple(_with_zero(step, name) for step in stage.steps))
            return replace(program, stages=tuple(stages))
    return program


def _with_zero(step: Step | Loop, name: str) -> Any:
    """Return a step that writes at 0 instead of a variable."""
    if isinstance(step, Loop):
        return replace(step, body=tuple(_with_zero(inner, name) for inner in step.body))

    def change(index: Expr) -> Expr:
        return substitute(index, {name: Expr(0)}, defaultdict(lambda: (0, 1 << 20)))

    if isinstance(step, Pass):
        return replace(step, sinks=tuple(replace(sink, index=change(sink.index)) for sink in step.sinks))
    if isinstance(step, Contract):
        return replace(step, out=replace(step.out, index=change(step.out.index)))
    return step
