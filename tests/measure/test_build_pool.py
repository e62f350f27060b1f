"""Kernels that other processes build are the same as those built here, and what fails there is left to the caller."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from threading import Event

import pytest

from korch.candidate.candidate import Candidate, Refusal, make_group
from korch.measure import build_pool, llvm_process
from korch.measure.build_pool import BuildPool
from korch.measure.compiler import Builder
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


PRODUCT = candidates_of(graph_of("matmul", "f32[8,32]", "f32[32,48]"))
SUM = candidates_of(graph_of("add", "f32[8,32]", "f32[8,32]"))
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
    wanted = PRODUCT | SUM | CONVOLUTION
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


def test_only_the_given_providers_are_asked(builder):
    assert BuildPool(builder, TARGET, {}).build(SUM, Deadline()) == {}


def test_plans_of_offers_are_not_sent():
    provider = ConvProvider()
    empty = len(pickle.dumps(provider))
    group = next(iter(CONVOLUTION.values())).group
    provider.offer(group, TARGET)
    assert len(pickle.dumps(provider)) == empty
