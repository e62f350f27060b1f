"""Properties of memory accesses that algebra proves, compared with enumeration."""

import re

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.primitive.types import DType
from korch.tile.check import places
from korch.tile.check.accesses import accesses
from korch.tile.check.check import check_program
from korch.tile.check.digits import Poly, Symbols, number
from korch.tile.check.reference import run_program
from korch.tile.ir.bind import bind
from korch.tile.ir.index import Expr, add, constant, scale, var
from korch.tile.ir.program import Axis, Buffer, Level, Literal, Load, Pass, Stage, Store, TileProgram
from tests.support.parse_tiles import parse_program
from tests.tile.test_programs import PROGRAMS
from tests.tile.tile_groups import lowered, normalization, offers_of

F32 = DType.F32


def random_program(rng):
    """Return a stage that writes and reads one buffer by affine indices, some with ragged axes or quotients."""
    grid = tuple(Axis(f"g{i}", int(rng.integers(1, 5))) for i in range(rng.integers(1, 3)))

    def index():
        axes, parts, step = [], [constant(int(rng.integers(0, 4)))], 1
        for axis in rng.permutation(len(grid)):
            if rng.random() < 0.3:
                total = int(rng.integers(1, 13))
                outer = grid[axis]
                size = -(-total // outer.size)
                if -(-total // size) == outer.size:
                    axes.append(Axis(f"r{axis}", size, ragged=(outer.name, total)))
                    parts += [scale(var(f"r{axis}"), step), scale(var(outer.name), step * size)]
                    step *= total if rng.random() < 0.9 else max(1, total - 1)
                    continue
            if rng.random() < 0.7:
                axes.append(Axis(f"v{axis}", int(rng.integers(1, 5))))
                parts.append(scale(var(f"v{axis}"), step))
                step *= axes[-1].size
            sign = -1 if rng.random() < 0.2 else 1
            parts += [scale(var(grid[axis].name), sign * step)]
            parts += [constant(step * (grid[axis].size - 1))] if sign < 0 else []
            step *= grid[axis].size + int(rng.integers(-1, 2)) * (rng.random() < 0.2)
        return tuple(axes), add(*parts)

    axes, place = index()
    write = Pass(axes, "", (Literal("x0", F32, 1.0),), (Store("o0", place, "x0"),))
    if rng.random() < 0.6:
        place = add(place, constant(int(rng.integers(-2, 3)) * int(rng.integers(1, 9))))
    else:
        axes, place = index()
    read = Pass(axes, "", (Load("x0", F32, "o0", place),), (Store("t", constant(0), "x0"),))
    buffers = (Buffer("o0", Level.OUTPUT, F32, int(rng.integers(8, 400))), Buffer("t", Level.TILE, F32, 1))
    return TileProgram(buffers, (Stage(grid, (write, read)),))


def test_what_algebra_shows_enumeration_does_not_refute():
    rng = np.random.default_rng(11)
    shown = {"inside": 0, "apart": 0}
    refuted = {"inside": 0, "apart": 0}
    for _ in range(1500):
        program = random_program(rng)
        (stage,) = program.stages
        is_within = True
        for access in accesses(stage):
            is_shown = places._shown_inside(program, stage, access)
            try:
                places._enumerate_inside(program, stage, access, "")
            except InvalidGraphError:
                assert not is_shown
                is_within = False
            shown["inside"] += is_shown
        refuted["inside"] += not is_within
        if is_within:
            is_shown = places._shown_apart(program, stage, "o0")
            try:
                places._enumerate_races(program, stage, "o0", "")
            except InvalidGraphError:
                assert not is_shown
                refuted["apart"] += 1
            shown["apart"] += is_shown
    assert min(*shown.values(), *refuted.values()) > 100, (shown, refuted)


def test_stages_of_any_size_are_decided():
    """2^40 points: nothing is enumerated."""
    grid, axes = (Axis("g", 1 << 20),), (Axis("v", 1 << 20),)
    place = add(scale(var("g"), 1 << 20), var("v"))
    buffers = (Buffer("i0", Level.INPUT, F32, 1 << 40), Buffer("o0", Level.OUTPUT, F32, 1 << 40))

    def program(index: Expr, read: Expr = place) -> TileProgram:
        load = Load("x0", F32, "i0", read)
        return TileProgram(buffers, (Stage(grid, (Pass(axes, "v", (load,), (Store("o0", index, "x0"),)),)),))

    assert places.indices_stay_inside(program(place)) + places.tasks_do_not_race(program(place)) == []
    turned = add(var("g"), scale(var("v"), 1 << 20))
    assert places.tasks_do_not_race(program(turned)) == []
    shared = add(scale(var("g"), 1 << 10), var("v"))
    with pytest.raises(InvalidGraphError, match="two tasks of a stage write one element"):
        places.tasks_do_not_race(program(shared))
    with pytest.raises(InvalidGraphError, match=r"an index of 1099511627776 reaches \[1, 1099511627776\]"):
        places.indices_stay_inside(program(add(place, constant(1))))


def test_large_pads_and_resizes_are_decided(target):
    """Choices and quotients of few values are bounded exactly; no point of the grid is enumerated."""
    group = normalization("f32[1,320,128,128]", (2, 3), (1,), "grow")
    choices = 0
    for offer in offers_of(group, target):
        program = lowered(group, offer, target)  # nothing is left undecided
        for stage in program.stages:
            found = [access for access in accesses(stage) if "?" in str(access.index)]
            assert all(places._shown_inside(program, stage, access) for access in found)
            choices += len(found)
    assert choices > 0


def test_polynomials_are_bounded_for_all_values_of_parameters():
    symbols = Symbols({"n": (1, 9), "m": (0, 5)})
    n, m = (Poly.of([((name,), 1)]) for name in "nm")
    assert symbols.at_most(n + m, n * number(2) + m)
    assert symbols.at_most(m, m * n)
    assert not symbols.at_most(n, m * n)
    assert (n * number(-1) + m).least(symbols.ranges) == -9
    assert (n * n - n).least(symbols.ranges) == 0


def test_what_is_shown_for_all_parameters_holds_for_each():
    """Numbers in programs are changed at random; what every check accepts is enumerated for some sizes."""
    rng = np.random.default_rng(17)
    accepted = refused = 0
    for _ in range(160):
        text = PROGRAMS[str(rng.choice(["product", "attention", "chain"]))]
        numbers = list(re.finditer(r"\b\d+\b", text))
        chosen = numbers[int(rng.integers(len(numbers)))]
        changed = max(0, int(chosen[0]) + int(rng.choice([-2, -1, 1, 2])))
        text = f"{text[: chosen.start()]}{changed}{text[chosen.end() :]}"
        try:
            program = parse_program(text)
            undecided = check_program(program)
        except InvalidGraphError:
            refused += 1
            continue
        accepted += not undecided
        for size in (0, 1, 5, 12) if not undecided else ():
            values = {p.name: min(max(size + i, p.low), p.high) for i, p in enumerate(program.parameters)}
            bound = bind(program, values)
            (stage,) = bound.stages
            for access in accesses(stage):
                places._enumerate_inside(bound, stage, access, "")
            for buffer in bound.buffers:
                if buffer.level is Level.OUTPUT:
                    places._enumerate_races(bound, stage, buffer.name, "")
            run_program(program, [np.ones(b.size) for b in bound.buffers if b.level is Level.INPUT], parameters=values)
    assert accepted > 15
    assert refused > 50
