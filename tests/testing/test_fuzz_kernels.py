"""Random groups of every element type with every provider: kernels compile and agree with the reference."""

import dataclasses

import numpy as np
import pytest

from korch.candidate.candidate import make_group
from korch.measure.compiler import Builder
from korch.primitive.graph import GraphBuilder
from korch.primitive.types import DType, ValueType
from korch.provider.generated import GeneratedProvider
from korch.target import LANES, Target
from tests.support.fuzz_kernels import MIXED, PLAIN, cases_of, check_cases, cpu_providers, draw_groups, run_round
from tests.support.matrix_units import EmulatedUnits


def test_every_element_type_is_drawn():
    assert {dtype for dtypes in (*PLAIN, *MIXED) for dtype in dtypes} == set(DType)
    groups = draw_groups(np.random.default_rng(0), (DType.F16, DType.F32), 6)
    assert {DType.F16, DType.F32} <= {t.dtype for group in groups for t in group.body.types}


@pytest.mark.parametrize("number", range(2))
def test_kernels_for_this_machine(number, target, builder):
    count, findings = run_round(0, number, target, builder, groups=3)
    assert count > 20
    assert list(map(str, findings)) == []


@pytest.mark.parametrize("isa", ["avx2", "generic", "amx"])
def test_kernels_for_other_instruction_sets(isa, target, tmp_path, monkeypatch):
    """Those of fewer lanes, and what is said to matrix units, which software stands for."""
    if target.lanes < LANES[isa]:
        pytest.skip("this machine runs no such instructions")
    other = Target(isa=isa, lanes=LANES[isa], threads=2, l2_bytes=64 << 10)
    builder = (EmulatedUnits if isa == "amx" else Builder)(isa, tmp_path)
    count, findings = run_round(1, len(isa), other, builder, groups=2)
    assert count > 10
    assert list(map(str, findings)) == []


class Broken(GeneratedProvider):
    """Its kernels of float32 do not compile, and those of bfloat16 compute something else."""

    def build(self, group, offer, target):
        kernel = super().build(group, offer, target)
        old, new = (" = fmul ", " = fadd ") if "bf16" in group.text else ("ret i32 0", "ret i32 missing")
        return dataclasses.replace(kernel, source=kernel.source.replace(old, new))


def test_what_is_wrong_is_found(target, builder, rng):
    groups = []
    for kind in ("f32", "bf16"):
        graph = GraphBuilder()
        graph.output("y", graph.add("exp", [graph.input("x", ValueType.parse(f"{kind}[4,20]"))]))
        groups.append(make_group(graph.freeze(), [0], [1]))
    cases = cases_of(groups, [Broken()], target, rng, each=1)
    first, second = check_cases(cases, builder, rng)
    assert "it does not compile: " in str(first) and "f32[4,20] = exp" in str(first)
    assert "relative away" in str(second) and "bf16[4,20] = exp" in str(second)
    assert not list(check_cases(cases_of(groups, cpu_providers(), target, rng), builder, rng))
