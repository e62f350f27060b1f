"""Kernels that are cross-compiled for devices that this machine lacks, and what the cache keeps of them."""

import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from korch.candidate.candidate import Group, Refusal, make_group
from korch.cuda import compile as compile_module
from korch.cuda.compile import Cubin, CubinCompiler, CubinFailure
from korch.cuda.kernel import make_launch
from korch.cuda.runtime.early import begun_early, without_early
from korch.cuda.runtime.record import BufferRecord
from korch.cuda.target import NOMINAL
from korch.primitive.precision import with_tf32
from korch.primitive.types import DType
from korch.provider.triton import TritonAttentionProvider, TritonProductProvider, TritonProvider, TritonWinogradProvider
from korch.tile.triton.launch import PrintedLaunches
from tests.cuda.cuda_groups import ATTENTIONS, PRODUCTS, WINOGRADS, attention, conv, product
from tests.tile.tile_groups import FAMILIES, Graph


@pytest.fixture(scope="module", params=[90, 80])
def compiler(request, tmp_path_factory):
    made = CubinCompiler(request.param, tmp_path_factory.mktemp("cubins"), workers=2)
    yield made
    made.close()


def sample(target):
    """Yield a kernel of every kind."""
    made = [
        (TritonProvider(), group)
        for family in ("reductions", "normalizations", "pools", "detections")
        for group in list(FAMILIES[family]())[:3]
    ]
    made += [(TritonProductProvider(), PRODUCTS[n]()) for n in ("matrices", "float16", "stem")]
    made += [
        (TritonAttentionProvider(), ATTENTIONS[n]()) for n in ("masked", "products of float16", "products of bfloat16")
    ]
    made += [(TritonWinogradProvider(), WINOGRADS["4 odd"]())]
    for provider, group in made:
        for offer in provider.offer(group, target)[:2]:
            kernel = provider.build(group, offer, target)
            if not isinstance(kernel, Refusal):
                yield kernel


def test_kernels_compile_within_their_bounds(compiler):
    target = NOMINAL[compiler.arch]
    launches = [launch for kernel in sample(target) for launch in kernel.launches]
    found = compiler.compile(launches)
    assert len(found) > 15
    for launch in launches:
        cubin = found[launch.symbol]
        assert isinstance(cubin, Cubin), f"{cubin}\n{launch.source}"
        assert cubin.image.startswith(b"\x7fELF")
        assert 0 < cubin.registers <= 255
        assert cubin.spill_bytes <= 256
        assert cubin.shared_bytes <= target.shared_bytes


def simple(text: str):
    source = f"@triton.jit\ndef NAME(p_i0, p_o0):\n    {text}\n"
    types = {"i0": DType.F32, "o0": DType.F32}
    return make_launch(PrintedLaunches(source, ("i0", "o0"), 1, 1), {"i0": 0, "o0": 1}, types)


def test_a_damaged_cubin_is_compiled_again(compiler, caplog):
    launch = simple("tl.store(p_o0, tl.load(p_i0) + 3.0)")
    first = compiler.compile([launch])[launch.symbol]
    path = compiler.folder / f"{launch.symbol}.cubin"
    path.write_bytes(path.read_bytes()[:-7])
    again = compiler.compile([launch])[launch.symbol]
    assert again == first
    assert "damaged" in caplog.text
    assert compiler.compile([launch])[launch.symbol] == first


def test_what_does_not_compile_says_why(compiler):
    wrong = simple("tl.store(p_o0, no_such_name)")
    right = simple("tl.store(p_o0, tl.load(p_i0) * 2.0)")
    found = compiler.compile([wrong, right])
    assert isinstance(found[right.symbol], Cubin)
    failure = found[wrong.symbol]
    assert isinstance(failure, CubinFailure) and "no_such_name" in failure.message


def folders_in(folder: Path) -> list[Path]:
    return list(folder.glob(".korch-*"))


SCRIPT = """
import sys, time
from korch.cuda.compile import CubinCompiler
from korch.cuda.kernel import make_launch
from korch.primitive.types import DType
from korch.tile.triton.launch import PrintedLaunches
from pathlib import Path

print("begun", flush=True)
types = {"i0": DType.F32, "o0": DType.F32}
source = "@triton.jit\\ndef NAME(p_i0, p_o0):\\n    tl.store(p_o0, tl.load(p_i0) + 7.0)\\n"
launch = make_launch(PrintedLaunches(source, ("i0", "o0"), 1, 1), {"i0": 0, "o0": 1}, types)
compiler = CubinCompiler(90, Path(sys.argv[1]), workers=1)
(found,) = compiler.compile([launch]).values()
print(type(found).__name__, flush=True)
if len(sys.argv) > 2:
    time.sleep(600)
compiler.close()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "cubins")]


def test_a_script_without_a_main_guard_runs_once_and_leaves_nothing(script, tmp_path):
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["begun", "Cubin"], done.stderr
    assert not list((tmp_path / "temporary").iterdir())


def test_a_process_that_is_killed_leaves_nothing(script, tmp_path):
    with subprocess.Popen([*script, "wait"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() + process.stdout.readline() == "begun\nCubin\n"
        assert folders_in(tmp_path / "temporary")
        process.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while folders_in(tmp_path / "temporary") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not folders_in(tmp_path / "temporary")


def test_a_compiler_that_crashes_is_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler = CubinCompiler(90, tmp_path, workers=1)
    launches = [simple(f"tl.store(p_o0, tl.load(p_i0) + {n}.0)") for n in (11, 12)]
    try:
        assert isinstance(compiler.compile(launches[:1])[launches[0].symbol], Cubin)
        (process,) = compiler._processes
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
        found = compiler.compile([launches[1]])[launches[1].symbol]
        assert found == CubinFailure(launches[1].symbol, "the compiler crashed")
        assert isinstance(compiler.compile([launches[1]])[launches[1].symbol], Cubin)
    finally:
        compiler.close()
    assert not folders_in(tmp_path)


def test_a_compiler_that_is_stuck_costs_one_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler = CubinCompiler(90, tmp_path, workers=1)
    first, stuck, last = (simple(f"tl.store(p_o0, tl.load(p_i0) + {n}.0)") for n in (13, 14, 15))
    try:
        assert isinstance(compiler.compile([first])[first.symbol], Cubin)
        (process,) = compiler._processes
        os.kill(process._process.pid, signal.SIGSTOP)
        with monkeypatch.context() as quick:
            quick.setattr(compile_module, "COMPILE_SECONDS", 0.1)
            found = compiler.compile([stuck])[stuck.symbol]
        assert found == CubinFailure(stuck.symbol, "the compiler took longer than 0.1 s")
        assert isinstance(compiler.compile([last])[last.symbol], Cubin)
    finally:
        compiler.close()
    assert not folders_in(tmp_path)


def test_warps_are_part_of_a_symbol():
    launch = simple("tl.store(p_o0, tl.load(p_i0))")
    assert replace(launch, warps=2).symbol == launch.symbol
    types = {"i0": DType.F32, "o0": DType.F32}
    source = "@triton.jit\ndef NAME(p_i0, p_o0):\n    tl.store(p_o0, tl.load(p_i0))\n"
    other = make_launch(PrintedLaunches(source, ("i0", "o0"), 1, 4), {"i0": 0, "o0": 1}, types)
    assert other.symbol != launch.symbol


@pytest.mark.parametrize(("variant", "instruction"), [("split", r"HGMMA\.\w+\.F32\.BF16"), ("f32", "FFMA")])
def test_variants_use_the_instructions_of_hopper(compiler, variant, instruction):
    if compiler.arch != 90:
        pytest.skip("the instructions are Hopper's")
    target, group = replace(NOMINAL[90], processors=8), product("f32[1024,256]", "f32[256,1024]")
    offers = [offer for offer in TritonProductProvider().offer(group, target) if variant in offer.variant.split()]
    assert offers
    for offer in offers:
        (launch,) = TritonProductProvider().build(group, offer, target).launches
        cubin = compiler.compile([launch])[launch.symbol]
        assert isinstance(cubin, Cubin), cubin
        assert re.search(instruction, *disassembled(cubin.image))


def test_rounded_factors_are_multiplied_from_where_they_were_copied_to(compiler):
    """With rounding in the loop, factors go through registers, and a fence precedes each multiplication."""
    if compiler.arch != 90:
        pytest.skip("the instructions are Hopper's")
    target, group = replace(NOMINAL[90], allow_tf32=True), product("f32[2048,512]", "f32[512,2048]")
    fixed, rounded = replace(group, constant_inputs=frozenset({1})), with_tf32(group.body)
    fences = []
    for each in (fixed, make_group(rounded, range(3), [value for _, value in rounded.outputs])):
        offer = next(o for o in TritonProductProvider().offer(each, target) if o.variant.startswith("128x128x32w8s3 "))
        (launch,) = TritonProductProvider().build(each, offer, target).launches
        cubin = compiler.compile([launch])[launch.symbol]
        assert isinstance(cubin, Cubin), cubin
        (text,) = disassembled(cubin.image)
        assert re.search(r"HGMMA\.\w+\.F32\.TF32", text)
        fences.append(len(re.findall("FENCE.VIEW.ASYNC", text)))
    assert fences[0] == 0 < fences[1]


def test_the_last_program_sees_what_the_others_stored(compiler):
    target, group = NOMINAL[compiler.arch], product("f16[128,768]", "f16[768,768]")
    offer = next(o for o in TritonProductProvider().offer(group, target) if "q" in o.variant.split(" ")[0])
    (launch,) = TritonProductProvider().build(group, offer, target).launches
    cubin = compiler.compile([launch])[launch.symbol]
    assert isinstance(cubin, Cubin), cubin
    (text,) = disassembled(cubin.image, arch=compiler.arch)
    assert re.search(r"BAR\.SYNC.*MEMBAR.*GPU.*ATOMG.*CCTL\.IVALL.*BAR\.SYNC", text, re.DOTALL)


def test_rows_of_a_depthwise_convolution_share_loads(compiler):
    target, provider = NOMINAL[compiler.arch], TritonProductProvider()
    group = conv("f16[1,256,56,56]", "f16[256,1,3,3]", (1, 1), (1, 1), (1, 1), groups=256)
    group = replace(group, constant_inputs=frozenset({1}))
    loads = {}
    for offer in provider.offer(group, target):
        if offer.variant in ("direct", "direct 4 of 256x1w4s0") and offer.inputs[0] == offer.outputs[0]:
            (launch,) = provider.build(group, offer, target).launches
            cubin = compiler.compile([launch])[launch.symbol]
            assert isinstance(cubin, Cubin) and cubin.spill_bytes == 0, cubin
            threads = launch.grid * launch.warps * 32
            count = len(re.findall(r"\sLDG\b", *disassembled(cubin.image, arch=compiler.arch)))
            loads[offer.variant, offer.inputs[0].is_plain] = count * threads / group.output_types[0].size
    for is_plain in (True, False):
        assert loads["direct 4 of 256x1w4s0", is_plain] < 0.6 * loads["direct", is_plain]


def gelu() -> Group:
    g = Graph()
    x = g.tensor("f32[8,65536]")
    cube = g.add("mul", [g.add("mul", [x, x]), x])
    inner = g.add("mul", [g.add("add", [x, g.add("mul", [cube, g.number(x, 0.044715)])]), g.number(x, 0.797884)])
    curve = g.add("add", [g.add("tanh", [inner]), g.number(x, 1.0)])
    return g.group(g.add("mul", [g.add("mul", [x, g.number(x, 0.5)]), curve]))


@pytest.mark.parametrize(
    ("provider", "group", "variant", "instruction", "most"),
    [
        (TritonProvider(), gelu(), "", r"F[A-Z]+|MUFU", 14),
        (TritonAttentionProvider(), attention(12, 1024, 1024, 64, 64, kind="f16"), "128x128w8s2 f16", "FMNMX", 1.5),
    ],
    ids=["gelu", "softmax"],
)
def test_functions_take_few_instructions(compiler, provider, group, variant, instruction, most):
    """Per power of two, of which an element takes one: GELU all of arithmetic, softmax only maxima and no limits."""
    target = NOMINAL[90]
    offer = next(offer for offer in provider.offer(group, target) if offer.variant == variant)
    (launch,) = provider.build(group, offer, target).launches
    cubin = compiler.compile([launch])[launch.symbol]
    assert isinstance(cubin, Cubin), cubin
    (text,) = disassembled(cubin.image, arch=compiler.arch)
    count = len(re.findall(rf"\s(?:{instruction})\b", text))
    assert 0 < count <= most * len(re.findall(r"MUFU\.EX2", text))


def early_launches():
    """Return launches of every kind in a form that may begin early."""
    target, group = NOMINAL[90], product("f16[128,768]", "f16[768,768]")
    joined = next(o for o in TritonProductProvider().offer(group, target) if "q" in o.variant.split(" ")[0])
    for kernel in (*sample(target), TritonProductProvider().build(group, joined, target)):
        for launch in kernel.launches:
            kinds = ["constant" if i == 1 else "arena" for i in range(max(launch.arguments) + 1)]
            yield begun_early(launch, [BufferRecord(kind, 0, 1 << 20) for kind in kinds])


def sass(compiler, launches):
    """Return the names of the instructions of each launch."""
    if compiler.arch != 90:
        pytest.skip("kernels begin early on Hopper and newer devices")
    found = compiler.compile(launches)
    cubins = [found[launch.symbol] for launch in launches]
    assert all(isinstance(cubin, Cubin) for cubin in cubins), cubins
    texts = disassembled(*(cubin.image for cubin in cubins))
    names = (re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w\S*)", text) for text in texts)
    return [[name if name == PREFETCH else name.split(".")[0] for name in each] for each in names]


PREFETCH = "CCTL.E.PF2"


GLOBAL = {*["LDG", "STG", "LD", "ST", "LDGSTS", "ATOM", "ATOMG", "RED", "REDG", "UTMALDG", "UTMASTG", "UBLKCP"]}


JUMPS = {"BRA", "BRX", "CALL", "EXIT", "RET"}


def waits_first(names):
    """Return whether no program passes the wait by, or touches memory or lets no other kernel begin before it."""
    before, after = names[: names.index("ACQBULK")], names[names.index("ACQBULK") :]
    return not (GLOBAL | JUMPS) & {*before} and bool(GLOBAL & {*after}) and before.count("PREEXIT") == 1


def test_every_kind_of_kernel_waits_before_it_touches_memory(compiler):
    launches = list({launch.symbol: launch for launch in early_launches()}.values())
    instructions = sass(compiler, launches)
    assert len(instructions) > 15
    for launch, names in zip(launches, instructions, strict=True):
        assert waits_first(names), launch.source
        assert (PREFETCH in names[: names.index("ACQBULK")]) is ("f.prefetch(" in launch.source)
        assert PREFETCH not in names[names.index("ACQBULK") :]
    assert any("ATOMG" in names for names in instructions)
    assert sum("f.prefetch(" in launch.source for launch in launches) > 10


def test_a_wait_that_is_too_late_is_found_out(compiler):
    late = []
    for number, text in enumerate(("tl.store(p_o0, 1.0)", "if pid > 3:\n        tl.store(p_o0, 1.0)")):
        launch = simple(f"pid = tl.program_id(0)\n    f.begin_next()\n    {text}\n    f.wait_for_earlier()")
        source = launch.source + "    tl.store(p_o0, tl.load(p_i0))\n"
        late.append(replace(launch, symbol=f"late{number}", source=source.replace(launch.symbol, f"late{number}")))
    assert not any(map(waits_first, sass(compiler, late)))


def test_a_kernel_compiles_for_an_older_device_without_the_lines(compiler):
    if compiler.arch != 80:
        pytest.skip("an older device is meant")
    launch = next(launch for launch in early_launches() if "f.prefetch(" in launch.source)
    plain = replace(launch, source=without_early(launch.source))
    assert isinstance(compiler.compile([plain])[launch.symbol], Cubin)


def disassembled(*images: bytes, arch: int = 90) -> list[str]:
    """Return the instructions of each cubin; the tool starts once, which takes longer than all that it then does."""
    tool = Path(pytest.importorskip("triton").__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    parts = [instructions_in(image) for image in images]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(parts))
        file.flush()
        command = [tool, "--binary", f"SM{arch}{'a' * (arch == 90)}", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ends = [text.index(f"/*{end:04x}*/") for end in accumulate(map(len, parts[:-1]), initial=0)]
    return [text[begin:end] for begin, end in pairwise([*ends, len(text)])]


def instructions_in(image: bytes) -> bytes:
    """Return the sections of an ELF file that have instructions."""
    (at,) = struct.unpack_from("<Q", image, 40)
    size, count, _ = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQ", image, at + size * i) for i in range(count)]
    return b"".join(image[at : at + size] for _, _, flags, _, at, size in sections if flags & EXECUTED)


EXECUTED = 4
"""The flag of a section that is executed, in ELF files."""
