"""Contractions on tile registers: the declared instructions, their emulation, and what kernels do with them."""

import ctypes
import re
from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import pytest

from korch.primitive.types import DType
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.target import LANES, Target
from korch.testing.kernels import load_kernels, run_kernel
from korch.tile.llvm.emit import Emit, SsaValue
from korch.tile.llvm.instructions import DOTS, DotInstruction
from korch.tile.llvm.isa import ISAS
from korch.tile.llvm.print import module
from tests.provider.test_bytes import conv, product
from tests.support.matrix_units import EmulatedUnits, emulation

TILES = [dot for dot in DOTS if dot.in_tiles]
AMX = Target(isa="amx", lanes=16, threads=1, l2_bytes=2 << 20)


@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: re.sub(r"^llvm\.\w+\.", "", dot.name))
def test_each_instruction_is_one_of_the_machine(dot: DotInstruction):
    kind, element = ("float", "bfloat") if dot.a is DType.BF16 else ("i32", "i8")
    emit, total = Emit(), SsaValue("%total", kind, dot.columns)
    a, b = (SsaValue(name, element, dot.columns * dot.group) for name in ("%a", "%b"))
    with emit.function(f"{total.type} @f({', '.join(x.typed for x in (total, a, b))}) #0"):
        if dot.in_tiles:
            dot.add_tiles(emit, 1, 2, 3)
        emit.effect(f"ret {(total if dot.in_tiles else dot.add(emit, total, a, b)).typed}")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    base = ISAS["neon" if "neon" in dot.name else "avx512"]
    isa = replace(base, features=(*base.features, dot.feature))
    text = llvm.parse_assembly(module(emit, isa, ""))
    assembly = llvm.Target.from_triple(text.triple).create_target_machine(opt=2).emit_assembly(text)
    operands = "%tmm3, %tmm2, %tmm1" if dot.in_tiles else "%zmm2, %zmm1, %zmm0"
    if base.name == "neon":
        operands = "v0.4s, v1.8h, v2.8h" if dot.a is DType.BF16 else "v0.4s, v1.16b, v2.16b"
    name = next(part for part in dot.name.split(".") if re.search("d[op]", part)).removeprefix("v")
    assert re.search(rf"\tv?{name}\t{operands}\n", assembly)
    assert dot.terms % dot.group == 0 and dot.group * dot.a.size_bytes == 4


def configuration(rows=(16,) * 8, row_bytes=(64,) * 8, palette=1) -> bytes:
    sizes = np.zeros(16, np.uint16)
    sizes[:8] = row_bytes
    return bytes([palette, *[0] * 15]) + sizes.tobytes() + bytes([*rows, *[0] * 8])


@pytest.mark.parametrize("dot", TILES, ids=lambda dot: dot.name.rpartition(".")[2])
@pytest.mark.parametrize(("rows", "groups"), [(16, 16), (5, 3)])
def test_tiles_compute_what_is_declared(dot, rows, groups, rng):
    """Operands in the declared layout: rows of a, and all columns of b for each group of terms."""
    emulation().emulated_ldtilecfg(
        configuration((rows,) * 6 + (groups,) * 2, (64, 64, 64, 64, 4 * groups, 4 * groups, 64, 64))
    )
    terms = groups * dot.group
    if dot.a is DType.BF16:
        a, b = rng.integers(-8, 9, (rows, terms)), rng.integers(-8, 9, (terms, dot.columns))
        raw = [(x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
        kind = np.float32
    else:
        limits = [np.iinfo(x.numpy) for x in (dot.a, dot.b)]
        a, b = (
            rng.integers(x.min, x.max + 1, size)
            for x, size in zip(limits, ((rows, terms), (terms, dot.columns)), strict=True)
        )
        raw, kind = [a.astype(dot.a.numpy), b.astype(dot.b.numpy)], np.int32
    grouped = np.ascontiguousarray(raw[1].reshape(groups, dot.group, dot.columns).swapaxes(1, 2))
    start = rng.integers(-99, 99, (rows, dot.columns)).astype(kind)
    found, before = np.zeros_like(start), emulation().emulated_faults()
    for register, array, step in ((0, start, 64), (4, raw[0], raw[0].strides[0]), (6, grouped, 64)):
        emulation().emulated_tileloadd64(register, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(step))
    getattr(emulation(), f"emulated_{dot.name.rpartition('.')[2]}")(0, 4, 6)
    emulation().emulated_tilestored64(0, found.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(64))
    assert emulation().emulated_faults() == before
    np.testing.assert_array_equal(found, start + (a @ b).astype(kind))


def test_the_emulation_finds_faults():
    memory = ctypes.create_string_buffer(16 * 64)

    def faults(*calls) -> list[int]:
        found = []
        for name, *given in calls:
            before = emulation().emulated_faults()
            getattr(emulation(), f"emulated_{name}")(*given)
            found.append(emulation().emulated_faults() - before)
        return found

    load = ("tileloadd64", 0, memory, ctypes.c_int64(64))
    dot = ("tdpbssd", 0, 4, 6)
    assert faults(("tilerelease",), load, ("tilezero", 0), dot) == [0, 1, 1, 1]
    wrong = [configuration((17,) * 8), configuration(row_bytes=(68,) * 8), configuration(palette=2)]
    assert faults(*(("ldtilecfg", each) for each in wrong)) == [1, 1, 1]
    some = configuration((16,) * 6 + (8,) * 2)
    assert faults(("ldtilecfg", some), load, dot, ("tdpbssd", 0, 0, 6), ("tilezero", 8)) == [0, 0, 1, 1, 1]
    assert faults(("ldtilecfg", configuration()), dot, ("tilerelease",)) == [0, 0, 0]
    assert emulation().emulated_is_configured() == 0


@pytest.mark.parametrize(
    ("provider", "group", "loads", "contractions"),
    [
        # Pairs of tiles times strips, each with four loads per step of 64 terms; of odd ones, fewer.
        (GemmProvider, product((64, 256), (256, 64)), 2 * 2 * 4 * 4, 1),
        (GemmProvider, product((48, 64), (64, 48)), (4 + 3) + (3 + 2), 1),
        (ConvProvider, conv((1, 64, 4, 16), (64, 64, 3, 3), pad=1), 2 * 2 * 9 * 4, 1),
    ],
    ids=["whole", "edges", "windows"],
)
def test_tiles_are_loaded_once_per_step(provider, group, loads, contractions, target, rng, tmp_path):
    if target.lanes != LANES["amx"]:
        pytest.skip("this machine has no vectors of 512 bits")
    builder = EmulatedUnits("amx", tmp_path)
    (offer,) = provider().offer(group, AMX)
    kernel = provider().build(group, offer, AMX)
    library = load_kernels([kernel], builder)
    inputs = [rng.integers(0, 100, t.shape).astype(t.dtype.numpy) for t in group.input_types]
    counts = (emulation().emulated_faults, emulation().emulated_configurations, emulation().emulated_loads)
    before = [count() for count in counts]
    run_kernel(kernel, group, offer, inputs, builder, library=library)
    assert emulation().emulated_is_configured() == 0
    assert [count() - n for count, n in zip(counts, before, strict=True)] == [0, contractions, loads]
