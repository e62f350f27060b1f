"""Kernels that other processes build are the same as those built here, and what fails there is left to the caller."""

import pickle
import subprocess
import sys
import time
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Refusal, make_group
from korch.measure import build_pool, llvm_process
from korch.measure.build_pool import BuildPool
from korch.measure.compiler import Builder
from korch.measure.cpu import CpuMeter
from korch.measure.pace import Pace
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import ValueType
from korch.provider.attention import AttentionProvider
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import AnyProvider, Kernel
from korch.system.deadline import Deadline
from korch.target import detect_target
from korch.tile.ir import index

PROVIDERS: tuple[AnyProvider, ...] = (ConvProvider(), GemmProvider(), GeneratedProvider(), AttentionProvider())
TARGET = detect_target(2, "a compiler")


def graph_of(op: str, *shapes: str, attributes: object = None) -> PrimitiveGraph:
    builder = GraphBuilder()
    inputs = [builder.input(f"x{i}", ValueType.parse(shape)) for i, shape in enumerate(shapes)]
    builder.output("y", builder.add(op, inputs, attributes))
    return builder.freeze()


def candidates_of(graph: PrimitiveGraph) -> dict[str, Candidate]:
    group = make_group(graph, range(len(graph.primitives)), [graph.outputs[0][1]])
    found = {}
    for provider in PROVIDERS:
        offers = provider.offer(group, TARGET)
        if not isinstance(offers, Refusal):
            made = [Candidate(group, provider.name, offer, provider.version) for offer in offers[:2]]
            found |= {candidate.kernel_key: candidate for candidate in made}
    assert found
    return found


def scaled() -> PrimitiveGraph:
    """A product by a number, which a graph has as a uniform constant of all its elements."""
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[64,112,112]"))
    factor = builder.constant(np.broadcast_to(np.float32(3.0), (64, 112, 112)))
    builder.output("y", builder.add("mul", [x, factor]))
    return builder.freeze()


PRODUCT = candidates_of(graph_of("matmul", "f32[8,32]", "f32[32,48]"))
SUM = candidates_of(graph_of("add", "f32[8,32]", "f32[8,32]"))
SCALED = candidates_of(scaled())
CONVOLUTION = candidates_of(
    graph_of("conv", "f32[1,16,8,8]", "f32[16,16,3,3]", attributes=ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1), 1))
)


@pytest.fixture
def builder(tmp_path) -> Builder:
    return Builder(TARGET.isa, tmp_path)


@pytest.fixture
def pool(builder):
    made = BuildPool(builder, TARGET, {provider.name: provider for provider in PROVIDERS})
    yield made
    made.close()


def built_here(candidate: Candidate) -> Kernel:
    (provider,) = (one for one in PROVIDERS if one.name == candidate.provider)
    kernel = provider.build(candidate.group, candidate.offer, TARGET)
    assert isinstance(kernel, Kernel)
    return kernel


def test_kernels_are_the_same_and_compiled(pool, builder):
    wanted = PRODUCT | SUM | SCALED | CONVOLUTION
    found = pool.build(wanted, Deadline())
    assert found.keys() == wanted.keys()
    for key, kernel in found.items():
        here = built_here(wanted[key])
        assert kernel == here and kernel.program == here.program and kernel.counts == here.counts
        assert all(builder.stored(text) is not None for text in kernel.texts)
    assert not builder.missing_work(text for kernel in found.values() for text in kernel.texts)


def test_a_farm_compiles_elsewhere(builder):
    pool = BuildPool(builder, TARGET, {provider.name: provider for provider in PROVIDERS}, compiles=False)
    (kernel, *_) = pool.build(SUM, Deadline()).values()
    assert builder.missing_work(kernel.texts) == 1


def test_what_was_begun_is_there_and_the_rest_is_not_waited_for(pool, monkeypatch):
    is_at_work, may_end, run, started = Event(), Event(), build_pool.compile_llvm, []

    def wait(*job):
        started.append(job)
        is_at_work.set()
        assert may_end.wait(60)
        run(*job)

    monkeypatch.setattr(build_pool, "compile_llvm", wait)
    pool.begin(PRODUCT | SUM)
    pool.begin(SUM)
    assert is_at_work.wait(60)
    shutdown = build_pool.ThreadPoolExecutor.shutdown

    def rest(executor, wait=True, *, cancel_futures=False):
        shutdown(executor, wait=False, cancel_futures=cancel_futures)
        may_end.set()  # not before what has not begun is left out
        shutdown(executor, wait=wait)

    monkeypatch.setattr(build_pool.ThreadPoolExecutor, "shutdown", rest)
    found = pool.rest()
    assert list(found) == list(PRODUCT)[:1] and len(started) == 1
    assert pool.rest() == {}


def test_a_deadline_ends_it(pool):
    assert pool.build(SUM, Deadline.after(-1.0, time.monotonic())) == {}


@pytest.mark.parametrize("program", ["input(); import os; os.abort()", "input(); print('out of luck', flush=True)"])
def test_what_fails_there_is_left_to_the_caller(pool, monkeypatch, program):
    llvm_process.end_processes()
    start = subprocess.Popen
    monkeypatch.setattr(
        llvm_process.subprocess, "Popen", lambda _, **rest: start([sys.executable, "-c", program], **rest)
    )
    assert pool.build(SUM, Deadline()) == {}
    llvm_process.end_processes()


class Local:
    """A provider that other processes can't import."""

    name = "generated"

    def __reduce__(self):
        raise pickle.PicklingError("it stays here")


def test_a_provider_that_stays_here_is_left_to_the_caller(builder):
    assert BuildPool(builder, TARGET, {"generated": Local()}).build(SUM, Deadline()) == {}


def test_a_uniform_constant_is_sent_as_one_element():
    group = next(iter(SCALED.values())).group
    (constant,) = (c for c in pickle.loads(pickle.dumps(group)).body.constants.values())
    assert constant.is_uniform and constant.type == ValueType.parse("f32[64,112,112]") and constant.scalar == 3
    assert len(pickle.dumps(group)) < 10_000


def test_hashes_are_not_sent():
    expression = index.add(index.var("i"), index.constant(3))
    assert hash(expression) and "_hash" in vars(expression)
    assert "_hash" not in vars(pickle.loads(pickle.dumps(expression)))


def test_it_ends_when_it_is_stopped(pool, monkeypatch):
    end = Deadline()

    def run(*job):
        end.stop()
        while not job[2].is_over:
            time.sleep(0.01)
        raise llvm_process.StoppedError("stopped")

    monkeypatch.setattr(build_pool, "compile_llvm", run)
    assert pool.build(SUM, end) == {}


def test_plans_of_offers_are_not_sent():
    provider = ConvProvider()
    empty = len(pickle.dumps(provider))
    group = next(iter(CONVOLUTION.values())).group
    provider.offer(group, TARGET)
    assert len(pickle.dumps(provider)) == empty


@pytest.fixture
def meter(pool) -> CpuMeter:
    found = object.__new__(CpuMeter)  # without calibration and database
    found.builds, found.pace, found.tell = pool, Pace(), lambda text: None
    found._kernels = {}
    return found


def test_a_meter_has_them_built_and_notes_the_time_of_each(meter):
    wanted = [*SUM.values(), *PRODUCT.values()]
    assert meter.prepare(wanted) == wanted
    assert meter._kernels.keys() == SUM.keys() | PRODUCT.keys()
    assert meter.pace.spent_s["compile"] > 0


@pytest.mark.parametrize("change", [{"served": SimpleNamespace(form="rows")}, {"provider": "a library"}])
def test_a_meter_builds_kernels_for_several_sizes_and_of_libraries_itself(meter, change):
    others = [replace(candidate, **change) for candidate in (*SUM.values(), *PRODUCT.values())]
    assert meter.prepare(others) == others
    assert meter._kernels == {} and meter.pace.spent_s == {}


def test_a_meter_leaves_out_what_there_is_no_time_to_build(meter):
    library = replace(next(iter(SUM.values())), provider="a library")
    wanted = [*SUM.values(), library, *PRODUCT.values()]
    assert meter.prepare(wanted, Deadline.after(0.01, time.monotonic())) == [library]
