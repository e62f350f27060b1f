"""Products whose operands are copied by warps of their own, as tensor descriptors say."""

from __future__ import annotations

import ctypes
import json
import re
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from korch.candidate.candidate import Candidate, Refusal
from korch.cuda import driver
from korch.cuda.compile import Cubin, CubinCompiler, CubinFailure
from korch.cuda.driver import CudaFunction, TensorMap
from korch.cuda.measure import worker
from korch.cuda.measure.job import job_key, job_of
from korch.cuda.runtime.early import begun_early
from korch.cuda.runtime.record import BufferRecord, LaunchRecord, StepProgram, _launch
from korch.cuda.runtime.schedule import early_launches, in_order
from korch.cuda.target import NOMINAL
from korch.primitive.types import DType
from korch.provider.triton import TritonProductProvider
from korch.provider.triton.product import ProgramTile
from korch.records import to_json
from korch.testing.kernels import compare
from korch.testing.samples import random_arrays
from korch.tile.ir.index import ZERO, add, scale, var
from korch.tile.ir.program import Axis, Buffer, Inside, Level, Load
from korch.tile.triton.matrix import CopiedBlock, CopiedMatrix, copied_block
from tests.cuda.cuda_groups import conv, product
from tests.cuda.test_compile import disassembled
from tests.support.cuda_kernels import run_cuda_kernel
from tests.tile.tile_groups import Graph

PROVIDER = TritonProductProvider()
SMALL = replace(NOMINAL[90], processors=2)
TF32 = replace(SMALL, allow_tf32=True)


def layer(kind, m, k, n, turned=False):
    """A product with a bias, an activation and a residual."""
    g = Graph()
    x = g.tensor(f"{kind}[{m},{k}]")
    w = g.transpose(g.tensor(f"{kind}[{n},{k}]"), 1, 0) if turned else g.tensor(f"{kind}[{k},{n}]")
    y = g.add("add", [g.add("matmul", [x, w]), g.wide(g.tensor(f"{kind}[{n}]"), (m, n))])
    return g.group(g.add("add", [g.add("tanh", [y]), g.tensor(f"{kind}[{m},{n}]")]))


def of_slice(width, k):
    g = Graph()
    x = g.slice(g.tensor(f"f16[130,{width}]"), (0, 0), (130, k), (1, 1))
    return g.group(g.add("matmul", [x, g.tensor(f"f16[{k},136]")]))


def of_function():
    g = Graph()
    return g.group(g.add("matmul", [g.add("exp", [g.tensor("f16[130,200]")]), g.tensor("f16[200,136]")]))


def fixed(group):
    return replace(group, constant_inputs=frozenset({1}))


def made(group, target=SMALL):
    """Return the offers with warps that copy, each with its kernel or why there is none."""
    offers = [o for o in PROVIDER.offer(group, target) if re.match(r"\d\S*d ", o.variant)]
    return [(offer, PROVIDER.build(group, offer, target)) for offer in offers]


@pytest.mark.parametrize(
    ("group", "target"),
    [
        (layer("f16", 130, 200, 136), SMALL),
        (layer("f16", 67, 200, 75, turned=True), SMALL),
        (fixed(layer("f32", 130, 100, 75)), TF32),
        (fixed(conv("f16[2,136,8,8]", "f16[70,136,1,1]")), SMALL),
        (of_slice(256, 128), SMALL),
    ],
    ids=["layer", "turned", "TF32", "convolution", "slice"],
)
def test_copied_operands_give_the_same_results(group, target, rng):
    found = [(offer, kernel) for offer, kernel in made(group, target) if not isinstance(kernel, Refusal)]
    for offer, kernel in found:
        assert ProgramTile.parse(offer.variant).copies and str(ProgramTile.parse(offer.variant)) == offer.variant
        (launch,) = kernel.launches
        assert "warp_specialize=True" in launch.source and len(launch.matrices) == 2
        inputs = random_arrays(rng, group.input_types)
        compare(group, inputs, run_cuda_kernel(kernel, group, offer, inputs))
    assert found


@pytest.mark.parametrize(
    ("group", "target"),
    [
        (product("f16[130,201]", "f16[201,136]"), SMALL),
        (product("f16[130,200]", "f16[200,132]"), SMALL),
        (product("f32[130,200]", "f32[200,136]"), SMALL),
        (product("f32[130,200]", "f32[200,136]"), TF32),
        (product("f16[2,130,200]", "f16[2,200,136]"), SMALL),
        (of_function(), SMALL),
        (conv("f16[1,64,16,16]", "f16[64,64,3,3]", (1, 1), (1, 1), (1, 1)), SMALL),
        (layer("f16", 130, 200, 136), replace(NOMINAL[80], processors=2)),
    ],
    ids=["odd terms", "odd columns", "f32", "TF32 across", "batch", "function", "window", "sm_80"],
)
def test_other_products_are_not_offered(group, target):
    assert not made(group, target)


@pytest.mark.parametrize("group", [product("f16[130,64]", "f16[64,136]"), of_slice(256, 200)], ids=["short", "slice"])
def test_what_no_descriptor_says_is_refused(group):
    kernels = [kernel for _, kernel in made(group)]
    assert kernels and all(isinstance(kernel, Refusal) and "descriptor" in kernel.reason for kernel in kernels)


@pytest.mark.parametrize(
    ("stride", "blocks", "guards", "is_copied"),
    [
        (128, 2, (), True),
        (64, 2, (), False),  # rows overlap
        (128, 3, (), False),  # what is read goes on in the next row
        (128, 3, (("p", 128),), True),
        (128, 3, (("p", 120),), False),  # zeros begin before the end of a row
        (128, 3, (("p", 128), ("i", 9)), False),  # some rows are zeros
        (128, 2, (("g", 1),), False),  # some blocks are zeros
    ],
)
def test_a_descriptor_says_exactly_what_is_read(stride, blocks, guards, is_copied):
    ranges = {"g": (0, blocks - 1), "i": (0, 15), "p": (0, 63)}
    numbers = {"g": var("g"), "i": var("i"), "p": add(scale(var("g"), 64), var("p"))}
    inside = tuple(Inside(numbers[name], 0, end) for name, end in guards)
    load = Load("x", DType.F16, "b", add(scale(var("i"), stride), numbers["p"]), inside)
    axes = Axis("i", 16), Axis("p", 64)
    found = copied_block(load, Buffer("b", Level.INPUT, DType.F16, 16 * stride), axes, (16, 64), ranges)
    assert (found is not None) is is_copied
    if found is not None:
        assert found == CopiedBlock(CopiedMatrix(DType.F16, (16, 128), (16, 64)), (ZERO, scale(var("g"), 64)), False)


@pytest.fixture(scope="module")
def launch():
    (launch,) = made(layer("f16", 1000, 776, 1000))[0][1].launches
    return launch


@pytest.mark.parametrize(
    ("group", "target"),
    [
        (layer("f16", 2048, 768, 3072), NOMINAL[90]),
        (layer("bf16", 1000, 776, 1000, turned=True), NOMINAL[90]),
        (fixed(product("f32[2048,512]", "f32[512,2048]")), TF32),
    ],
    ids=["float16", "bfloat16", "TF32"],
)
def test_some_warps_copy_and_others_multiply(group, target, tmp_path):
    compiler = CubinCompiler(90, tmp_path, workers=1)
    (cubin,) = compiler.compile(made(group, target)[0][1].launches).values()
    compiler.close()
    assert isinstance(cubin, Cubin), cubin
    assert cubin.spill_bytes <= 64 and cubin.shared_bytes <= target.shared_bytes
    (text,) = disassembled(cubin.image)
    assert {"UTMALDG.2D", "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC"} <= {*re.findall(r"U[\w]+\.\w+", text)}
    assert "HGMMA" in text and "LDGSTS" not in text


@pytest.mark.parametrize(("arch", "warps", "block"), [(80, 4, None), (90, 8, None), (90, 4, (128, 32))])
def test_what_the_compiler_does_otherwise_is_refused(arch, warps, block, launch, tmp_path):
    first, second = launch.matrices
    wrong = replace(launch, warps=warps, matrices=(replace(first, block=block or first.block), second))
    compiler = CubinCompiler(arch, tmp_path, workers=1)
    assert isinstance(compiler.compile([wrong])[launch.symbol], CubinFailure)
    compiler.close()


# How they are launched


@pytest.fixture
def launched(monkeypatch):
    """Return what the driver is told: of descriptors the arguments, of launches the threads and the parameters."""
    seen = []

    class Driver:
        def __getattr__(self, name):
            return lambda *_: 0

        def cuTensorMapEncodeTiled(self, reference, kind, rank, address, *rest):  # noqa: N802 - the driver's name
            assert ctypes.addressof(reference._obj) % 64 == 0
            reference._obj.opaque[15] = address.value
            seen.append((kind, rank, *(list(n) if isinstance(n, ctypes.Array) else n for n in rest)))
            return 0

        def cuLaunchKernelEx(self, reference, function, parameters, extra):  # noqa: N802 - the driver's name
            kinds = [TensorMap, *[ctypes.c_uint32] * 2, *[ctypes.c_uint64] * 2] * 2 + [ctypes.c_uint64] * 3
            values = [kind.from_address(at) for kind, at in zip(kinds, parameters, strict=True)]
            plain = [value.opaque[15] if isinstance(value, TensorMap) else value.value for value in values]
            seen.append((reference._obj.block[0], plain))
            return 0

    monkeypatch.setattr(driver, "_driver", Driver)
    return seen


A, B = CopiedMatrix(DType.F16, (130, 200), (128, 64)), CopiedMatrix(DType.F32, (200, 136), (16, 128))
TOLD = [
    (6, 2, [200, 130], [400], [64, 128], [1, 1], 0, 3, 2, 0),
    (7, 2, [136, 200], [544], [32, 16], [1, 1], 0, 3, 2, 0),
    (384, [4096, 130, 200, 200, 1, 8192, 200, 136, 136, 1, 12288, 0, 0]),
]


def test_descriptors_are_passed_by_value(launched):
    CudaFunction(b"", "k", 1024, 4, (A, B)).launch(7, [4096, 8192, 12288], 99)
    assert launched == TOLD


def test_the_measuring_process_passes_the_same(launched, tmp_path):
    (tmp_path / "k.cubin").write_bytes(b"")
    step = {"path": str(tmp_path / "k.cubin"), "symbol": "k", "shared_bytes": 0, "warps": 4, "programs": 7}
    step |= {"arguments": [1, 2, 0], "matrices": [A, B]}
    buffers = [SimpleNamespace(data_ptr=lambda at=at: at) for at in (12288, 4096, 8192)]
    with ExitStack() as loaded:
        make = worker._launch_maker({"launches": [json.loads(to_json(step))]}, loaded)
        make(buffers, SimpleNamespace(cuda_stream=0))()
    assert launched == TOLD


def test_a_job_and_a_record_keep_what_is_described(launch):
    group = layer("f16", 1000, 776, 1000)
    offer, kernel = made(group)[0]
    job = job_of(Candidate(group, "triton-product", offer), kernel, False)
    assert job["launches"][0]["matrices"][0] == {"dtype": "f16", "shape": [1000, 776], "block": [128, 64]}
    assert json.loads(json.dumps(job)) == job and len(job_key(job)) == 20
    types = tuple(dtype.value for dtype in launch.signature)
    record = LaunchRecord(launch.symbol, launch.grid, 4, 1024, types, launch.arguments, launch.matrices)
    assert _launch(json.loads(to_json(asdict(record)))) == record
    assert record.launch({launch.symbol: launch.source}) == launch


def test_such_a_launch_does_not_begin_early(launch):
    buffers = [BufferRecord("arena", 0, 1 << 20)] * (max(launch.arguments) + 1)
    assert begun_early(launch, buffers) is launch
    record = LaunchRecord("k", 1, 4, 0, (), ())
    step = StepProgram((), 0, 0, (record, replace(record, matrices=launch.matrices), record))
    assert early_launches([step], in_order([step])) == ((False, False, True),)
