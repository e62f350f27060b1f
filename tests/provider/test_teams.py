"""Kernels on teams of several threads: the threads that they see, their barriers and their results.

The test machine usually has fewer cores than the teams have threads.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Group, Offer, Refusal, make_group
from korch.errors import ProviderError
from korch.measure.compiler import Builder
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.provider.provider import Kernel, Threading, load_providers, named_kernel
from korch.provider.teams import team_refusal
from korch.runtime.bind import PlanStep
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.target import Target
from korch.testing.kernels import check_kernel, run_kernel
from korch.testing.samples import random_arrays
from tests.provider.linear_groups import Graph
from tests.support.c_code import MEMBER, llvm_of

PROVIDERS = {provider.name: provider for provider in load_providers()}


@pytest.fixture
def four(target: Target) -> Target:
    return replace(target, threads=4)


def witness(body: str, threads: int) -> Kernel:
    """Return a kernel of a given body, which may write what it sees."""
    text = (
        f"{MEMBER}static long share(long tasks, long me, long all) {{ return tasks * me / all; }}\n"
        "int witness_team(void *const *buffers, Member *own) {\n"
        "  const long me = own->me, threads = own->threads;\n"
        "  const float *x = buffers[0];\n"
        "  float *y = buffers[1], *room = buffers[2];\n"
        f"{body}\n  return 0;\n}}\n"
        "int witness_run(void *state, void *const *buffers) {\n"
        f"  return korch_region({threads}, witness_team, buffers);\n}}\n"
    )
    text = llvm_of(text).replace("@witness_", "@NAME_")
    return named_kernel(text, threading=Threading.TEAM, workspace_bytes=512)


def negation() -> Group:
    g = Graph()
    return g.group(g.add("neg", [g.tensor(64)]))


SEES = """
  room[0] = 0;
  if (me == 0) for (int i = 0; i < 64; ++i) y[i] = -1;
  if (threads > 1) own->meet(own);
  y[me] = me, y[8 + me] = threads;
  if (threads > 1) own->meet(own);
  y[16 + me] = y[8 + (me + 1) % threads];
"""

SUMS = """
  const long begin = share(64, me, threads), end = share(64, me + 1, threads);
  for (long turn = 0; turn < 400; ++turn) {
    for (long i = begin; i < end; ++i) room[i] = turn == 0 ? x[i] : y[i];
    if (threads > 1) own->meet(own);
    for (long i = begin; i < end; ++i) room[64 + i] = room[63 - i] + 1;
    if (threads > 1) own->meet(own);
    for (long i = begin; i < end; ++i) y[i] = room[64 + i];
  }
"""


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_threads_of_a_team_see_and_wait_for_each_other(threads: int, target: Target, builder: Builder) -> None:
    group, x = negation(), np.arange(64, dtype=np.float32)
    offer = Offer(*group.plain_layouts)
    seen, summed = (
        run_kernel(witness(body, threads), group, offer, [x], builder, threads=threads)[0] for body in (SEES, SUMS)
    )
    assert seen[:8].tolist() == [*range(threads), *[-1] * (8 - threads)]
    assert seen[8:16].tolist() == seen[16:24].tolist() == [threads] * threads + [-1] * (8 - threads)
    assert summed.tolist() == (x + 400).tolist()


def test_a_kernel_that_fails_leaves_its_team_free(four: Target, builder: Builder) -> None:
    g = Graph()
    for i in range(2):
        g.output(f"y{i}", g.add("neg", [g.tensor(64, name=f"x{i}")]))
    graph = g.freeze()
    steps = []
    for i, body in enumerate((f"{SEES}\n  if (x[0] < 0) return 1;\n  x = y;", SUMS)):
        group = make_group(graph, [i], [graph.primitives[i].output])
        steps.append(PlanStep(Candidate(group, "witness", Offer(*group.plain_layouts)), witness(body, 4)))
    executable = Executable(build(graph, steps, four, builder))
    good = np.arange(64, dtype=np.float32)
    for _ in range(3):
        with pytest.raises(ProviderError):
            executable(good - 1, good)
        # Where other processes want the cores, the caller works alone for a while.
        for _ in range(600):
            seen, summed = executable(good, good)
            assert summed.tolist() == (good + 400).tolist()
            if seen[8] != 1:
                break
            time.sleep(0.1)
        assert seen[8:12].tolist() == [4, 4, 4, 4]


def test_what_can_not_run_in_a_team_is_refused() -> None:
    def reason(threading: Threading, **more: Any) -> str | None:
        refusal = team_refusal(Kernel("k", "", threading=threading, **more))
        return refusal and refusal.reason

    assert reason(Threading.CALLER) is reason(Threading.TEAM) is None
    assert reason(Threading.OWN) == "the kernel has threads of its own"
    assert reason(Threading.TEAM, has_state=True) == "a kernel with a state may have threads of its own"


def product() -> Group:
    g = Graph()
    return g.group(g.add("tanh", [g.add("matmul", [g.tensor(7, 24), g.weights(24, 33)])]))


def total() -> Group:
    g = Graph()
    return g.group(g.add("reduce_sum", [g.tensor(7, 24)], ReduceAttributes((1,))))


def deep() -> Group:
    g = Graph()
    same = ((1, 1), (1, 1), (1, 1), (1, 1))
    return g.group(g.add("conv", [g.tensor(1, 16, 9, 13), g.weights(16, 1, 3, 3)], ConvAttributes(*same, 16)))


def softmax_down_the_columns() -> Group:
    """Several stages, each with a barrier."""
    g = Graph()
    x, wide = g.tensor(96, 80), BroadcastAttributes((96, 80))

    def reduced(kind: str, value: int) -> int:
        return g.add("broadcast", [g.add(kind, [value], ReduceAttributes((0,)))], wide)

    power = g.add("exp", [g.add("sub", [x, reduced("reduce_max", x)])])
    return g.group(g.add("div", [power, reduced("reduce_sum", power)]))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    ("make", "provider"),
    [(product, "gemm"), (total, "generated"), (deep, "conv"), (softmax_down_the_columns, "generated")],
)
def test_kernels_run_on_the_threads_that_they_declare(
    make: Any, provider: str, threads: int, target: Target, builder: Builder, rng: np.random.Generator
) -> None:
    group, some = make(), replace(target, threads=threads)
    offers = PROVIDERS[provider].offer(group, some)
    assert not isinstance(offers, Refusal), offers
    kernel = PROVIDERS[provider].build(group, offers[0], some)
    assert isinstance(kernel, Kernel)
    assert "#pragma omp" not in kernel.source
    has_team = any(f"{start}{kernel.symbol}_team(" in kernel.source for start in ("int ", "define i32 @"))
    assert has_team == (kernel.threading is Threading.TEAM)
    assert threads > 1 or kernel.threading is Threading.CALLER
    if make is softmax_down_the_columns:
        assert (kernel.threading is Threading.TEAM) == (threads > 1)
    inputs = random_arrays(rng, group.input_types, specials=False)
    check_kernel(kernel, group, offers[0], inputs, builder)
