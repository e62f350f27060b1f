"""Programs that compute a graph are accepted, and programs that do not are refused."""

import numpy as np
import pytest

from korch.primitive import reference
from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.superopt.field import NotProvableError, P, PairField, Q
from korch.superopt.verify import compute, verify
from korch.tile.check.arithmetic import Float64
from korch.tile.check.reference import run_program
from tests.superopt.superopt_programs import ATTENTION, LORA, plain_attention, programs
from tests.support.blocks import BLOCKS, Block, lora
from tests.support.mutants import mutant
from tests.support.parse_tiles import parse_program

F32 = DType.F32


def elements(field: PairField, *shape: int) -> Array:
    return field.random(shape, F32)


@pytest.mark.parametrize("number", range(5))
def test_programs_that_are_equal_are_accepted(number):
    graph, program = list(programs())[number]
    verdict = verify(program, graph)
    assert verdict.is_equal, verdict.reason


REFUSED = {
    "the denominator is not rescaled": (ATTENTION, "x2 = f32 mul(x0, x1)\n      x3", "x2 = f32 mul(x0, x0)\n      x3"),
    "the result is not rescaled": (ATTENTION, " rescale factor[i]", ""),
    "the maximum is not carried": (ATTENTION, "store top[i] = x5", "store top[i] = x0"),
    "the last part is longer": (ATTENTION, "c<5 | r<min(4, 9 - 4*j)", "c<5 | r<min(4, 8 - 4*j)"),
    "a sum instead of the maximum overflows": (ATTENTION, "      max most[i] = x0", "      sum most[i] = x0"),
    "a maximum that begins with 0 loses small scores": (ATTENTION, "x0 = f32 -inf", "x0 = f32 0.0"),
    "a product is added twice": (LORA, "u[8*i + j] += t[2*i + r]", "u[8*i + j] += u[2*i + r]"),
    "an operand is transposed": (LORA, "w[8*p + j]", "w[8*j + p]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_programs_that_differ_are_refused(case):
    text, old, new = REFUSED[case]
    assert text.count(old) == 1
    graph = plain_attention() if text is ATTENTION else lora()
    assert not verify(parse_program(text.replace(old, new)), graph).is_equal


def test_mutants_are_refused_or_equal():
    """A mutant that is accepted gives the same numbers in float64, for other inputs."""
    rng, accepted, refused = np.random.default_rng(5), 0, 0
    for graph, program in programs():
        for number in range(12):
            _, changed = mutant(program, rng)
            if changed == program or not verify(changed, graph, number).is_equal:
                refused += 1
                continue
            accepted += 1
            feeds = {name: rng.standard_normal(graph.types[v].shape) for name, v in graph.inputs}
            wanted = reference.run(graph, feeds)["y" if "y" in dict(graph.outputs) else "o0"]
            (found,) = run_program(changed, [*feeds.values()], number, Float64())
            np.testing.assert_allclose(found, wanted.reshape(-1), rtol=1e-9, atol=1e-12)
    assert refused > 30 > accepted


def test_laws_of_the_fields():
    field = PairField(3)
    x, y = elements(field, 50), elements(field, 50)

    def f(op: str, *arguments: Array) -> Array:
        return field.apply(op, F32, arguments)

    def equal(a: Array, b: Array) -> bool:
        return bool((a.real == b.real).all())

    assert equal(f("exp", f("add", x, y)), f("mul", f("exp", x), f("exp", y)))
    assert equal(f("sqrt", f("mul", x, y)), f("mul", f("sqrt", x), f("sqrt", y)))
    assert equal(f("mul", f("sqrt", x), f("sqrt", x)), f("abs", x))
    assert not equal(f("sqrt", f("mul", x, x)), x)
    assert equal(f("mul", f("sign", x), x), f("abs", x))
    assert equal(f("max", x, f("max", x, y)), f("max", y, x))
    assert not equal(f("max", f("add", x, x), f("add", y, x)), f("add", f("max", x, y), x))
    assert equal(f("div", x, f("exp", y)), f("mul", x, f("exp", f("neg", y))))
    assert equal(f("sigmoid", x), f("reciprocal", f("add", field.literal(F32, 1.0), f("exp", f("neg", x)))))
    assert equal(f("erf", x), f("erf", x))
    assert not equal(f("erf", x), f("tanh", x))
    assert equal(f("sub", f("mul", x, field.literal(F32, 0.5)), y), f("sub", f("div", x, field.literal(F32, 2.0)), y))


def test_what_is_undefined_stays_undefined():
    field = PairField()
    x, lowest = elements(field, 3), field.literal(F32, -np.inf)
    zero = field.literal(F32, 0.0)
    assert np.isnan(field.apply("div", F32, [x, zero + 0 * x]).real).all()
    assert (field.apply("exp", F32, [lowest]).real == 0).all()
    assert (field.apply("max", F32, [lowest, x]) == x).all()
    assert np.isnan(field.apply("exp", F32, [x]).imag).all()
    assert not np.isnan(field.apply("exp", F32, [field.apply("exp", F32, [x])]).real).any()
    with pytest.raises(NotProvableError):
        field.apply("cast", DType.I32, [x])


def test_the_primes():
    assert P == 2 * Q + 1
    assert P % 4 == Q % 4 == 3
    assert all(n % d for n in (P, Q) for d in range(2, 8200))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_defined_in_the_fields(name):
    graph, field = BLOCKS[name](), PairField()
    (result,) = compute(graph, [field.random(graph.types[v].shape, F32) for _, v in graph.inputs], field)
    assert not np.isnan(result.real).any()


def test_a_cast_to_integers_is_not_proven():
    b = Block()
    graph = b.result(b.add("mul", (b.tensor("x", 2), b.tensor("z", 2))))
    program = parse_program(
        "buffer x: input f32[2]\nbuffer z: input f32[2]\nbuffer y: output f32[2]\nstage g<1\n  pass i<2\n"
        "    x0 = f32 load x[i]\n    x1 = i32 cast(x0)\n    x2 = f32 cast(x1)\n    store y[i] = x2\n"
    )
    assert verify(program, graph).reason == "a cast to i32"


def test_a_branch_that_is_taken_for_few_inputs_counts():
    """The last element of a sum of positive parts is left out: where it is negative that makes no difference."""
    b = Block()
    x = b.tensor("x", 1, 3)
    graph = b.result(b.along("sum", b.add("max", (x, b.number(0.0, x)))))
    text = (
        "buffer x: input f32[3]\nbuffer y: output f32[1]\nstage g<1\n  pass i<1 | j<{}\n"
        "    x0 = f32 load x[j]\n    x1 = f32 0.0\n    x2 = f32 max(x0, x1)\n    sum y[i] = x2\n"
    )
    assert verify(parse_program(text.format(3)), graph).is_equal
    assert not any(verify(parse_program(text.format(2)), graph, seed).is_equal for seed in range(64))


@pytest.mark.parametrize("columns", ["j<4", "j<2"])
def test_a_maximum_that_misses_an_element_is_refused(columns):
    """In exact arithmetic any number may be subtracted; large inputs overflow where it is not the greatest one."""
    b = Block()
    graph = b.result(b.softmax(b.add("matmul", (b.tensor("x", 1, 6), b.tensor("w", 6, 5)))))
    text = (
        "buffer x: input f32[6]\nbuffer w: input f32[30]\nbuffer y: output f32[5]\nbuffer c: tile f32[8]\n"
        "buffer m: tile f32[1]\nbuffer s: tile f32[1]\nstage g<1\n  pass i<1 j<5\n    x0 = f32 0.0\n"
        "    store c[j] = x0\n  contract i<1 j<5 | p<6 by f32\n    c[j] += x[p] * w[5*p + j]\n  pass i<1 | {}\n"
        "    x0 = f32 load c[j]\n    max m[i] = x0\n  pass i<1 | j<5\n    x0 = f32 load c[j]\n"
        "    x1 = f32 load m[i]\n    x2 = f32 sub(x0, x1)\n    x3 = f32 exp(x2)\n    sum s[i] = x3\n"
        "  pass i<1 j<5\n    x0 = f32 load c[j]\n    x1 = f32 load m[i]\n    x2 = f32 sub(x0, x1)\n"
        "    x3 = f32 exp(x2)\n    x4 = f32 load s[i]\n    x5 = f32 div(x3, x4)\n    store y[j] = x5\n"
    )
    assert verify(parse_program(text.format("j<5")), graph).is_equal
    for seed in range(16):
        assert "in its own types" in verify(parse_program(text.format(columns)), graph, seed).reason
