"""The loops of a kernel's assembly, and their instructions by class."""

import re

import pytest

from korch.report.assembly import assembly_of, classes_of, code_lines, loops_of

SOURCE = """target triple = "x86_64-unknown-linux-gnu"

declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)

define void @k(ptr %a, ptr %y, i64 %n) #0 {
entry:
  br label %outer
outer:
  %i = phi i64 [ 0, %entry ], [ %i2, %last ]
  %row = getelementptr [64 x float], ptr %a, i64 %i
  br label %inner
inner:
  %j = phi i64 [ 0, %outer ], [ %j2, %inner ]
  %sum = phi <8 x float> [ zeroinitializer, %outer ], [ %next, %inner ]
  %at = getelementptr float, ptr %row, i64 %j
  %x = load <8 x float>, ptr %at, align 4
  %next = call <8 x float> @llvm.fma.v8f32(<8 x float> %x, <8 x float> %x, <8 x float> %sum)
  %j2 = add i64 %j, 8
  %more = icmp slt i64 %j2, 64
  br i1 %more, label %inner, label %last
last:
  %to = getelementptr <8 x float>, ptr %y, i64 %i
  store <8 x float> %next, ptr %to, align 4
  %i2 = add i64 %i, 1
  %again = icmp slt i64 %i2, %n
  br i1 %again, label %outer, label %end
end:
  ret void
}

attributes #0 = { "target-features"="+avx2,+fma" }
"""


def test_it_finds_nested_loops_and_counts_each_instruction_once() -> None:
    outer, inner = loops_of(assembly_of(SOURCE))
    assert (outer.function, outer.depth, inner.depth) == ("k", 1, 2)
    assert inner.own["multiply-adds"] == 1
    assert inner.own["loads"] == 1
    assert "stores" not in inner.own
    assert outer.own["stores"] == 1
    assert "multiply-adds" not in outer.own
    assert set(inner.lines) < set(outer.lines)


def test_a_loop_of_another_instruction_set_is_counted() -> None:
    other = SOURCE.replace("x86_64", "aarch64").replace('"+avx2,+fma"', '"+neon"')
    outer, inner = loops_of(assembly_of(other))
    assert inner.own["multiply-adds"] == 2  # two registers of 128 bits
    assert inner.own["loads"] >= 1
    assert outer.own["stores"] >= 1


@pytest.mark.parametrize(
    ("line", "classes"),
    [
        ("vfmadd231ps\t(%rax), %zmm1, %zmm2", ("multiply-adds", "loads")),
        ("tdpbf16ps\t%tmm2, %tmm1, %tmm0", ("multiply-adds",)),
        ("vpdpbusd\t%zmm2, %zmm1, %zmm0", ("multiply-adds",)),
        ("tileloadd\t(%rsi,%rdx), %tmm0", ("loads",)),
        ("tilestored\t%tmm0, (%rsi,%rdx)", ("stores",)),
        ("vmovups\t(%rax), %zmm0", ("loads",)),
        ("vmovups\t%zmm0, (%rax)", ("stores",)),
        ("vmovntps\t%zmm0, (%rax)", ("stores",)),
        ("vmovups\t%zmm0, (%rax) {%k1}", ("stores",)),
        ("vmovups\t(%rax), %zmm0 {%k1} {z}", ("loads",)),
        ("vbroadcastss\t(%rax), %zmm0", ("loads",)),
        ("vbroadcastss\t%xmm1, %zmm0", ("shuffles",)),
        ("vpmovsxbd\t(%rax), %zmm0", ("shuffles", "loads")),
        ("vextractps\t$1, %xmm0, 12(%rdx)", ("shuffles", "stores")),
        ("vaddps\t%zmm1, %zmm2, %zmm0", ("other vector",)),
        ("prefetcht0\t64(%rax)", ("prefetches",)),
        ("cmpq\t$8, (%rax)", ("scalar", "loads")),
        ("leaq\t(%rax,%rcx), %rdx", ("scalar",)),
        ("movq\t%rax, 8(%rsp)", ("stores",)),
        ("jl\t.LBB0_1", ("scalar",)),
        ("fmla\tv0.4s, v1.4s, v2.s[0]", ("multiply-adds",)),
        ("ldr\tq0, [x1, #16]", ("loads",)),
        ("stp\tq0, q1, [x1]", ("stores",)),
        ("fadd\tv0.4s, v1.4s, v2.4s", ("other vector",)),
        ("zip1\tv0.4s, v1.4s, v2.4s", ("shuffles",)),
        ("add\tx0, x0, #1", ("scalar",)),
    ],
)
def test_each_instruction_has_its_class(line: str, classes: tuple[str, ...]) -> None:
    assert classes_of(*line.split("\t")) == classes


def test_a_kernel_is_shown_by_its_program_and_its_innermost_loops() -> None:
    lines = code_lines({"k.ll": SOURCE, "k.tile": "program text\n"}, "k", most=3)
    assert lines[:2] == ["tile program:", "program text"]
    heads = [line for line in lines if re.fullmatch(r"k, \.LBB\w+:", line)]
    assert len(heads) == 1
    assert lines[-1].endswith(" more lines")
    assert any("vfmadd" in line for line in code_lines({"k.ll": SOURCE}, "k"))
    assert code_lines({}, "k") == []
