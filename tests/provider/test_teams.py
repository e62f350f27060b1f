"""Kernels side by side on several threads each: the threads that their regions see, and their results.

The test machine usually has fewer cores than the teams have threads.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Offer, Refusal, make_group
from korch.errors import ProviderError
from korch.measure.compiler import NATIVE_FOLDER, Builder
from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.provider.concurrent import ConcurrentProvider
from korch.provider.provider import Kernel, Threading, named_kernel
from korch.provider.teams import team_refusal
from korch.report.explain import explain
from korch.report.threads import watch_threads
from korch.runtime.artifact import Artifact
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.runtime.library import Handle, load_plans
from korch.runtime.program import PlanStep
from korch.runtime.report import Report
from korch.runtime.unpack import unpack
from korch.target import Target
from korch.testing.kernels import run_kernel
from korch.testing.samples import random_arrays
from korch.testing.tolerance import assert_same
from tests.provider.onednn_groups import Graph
from tests.provider.test_concurrent import CONCURRENT, GRAPH, PLAIN, PROVIDERS, built, check, needs_watching, offered


def for_threads(target: Target, threads: int) -> Target:
    return replace(target, threads=threads)


LANES = [
    (4, "3: product gemm + total generated | deep conv"),
    (4, "2: heads attention | 2: deep conv + small conv"),
    (8, "4: deep conv | 4: product gemm"),
    (8, "2: rounded winograd | 2: total generated | 3: heads attention + product gemm"),
    (8, "6: deep conv | small onednn | total generated"),
    (4, "2: deep conv"),
]


def proposed(text: str, target: Target) -> Candidate:
    """Return the candidate of lanes as `LANES` has them."""
    lanes, threads = [], []
    for lane in text.split(" | "):
        count, _, parts = lane.rpartition(": ")
        threads.append(int(count or 1))
        lanes.append([offered(*part.split(), target) for part in parts.split(" + ")])
    made = CONCURRENT.propose(GRAPH, lanes, target, threads)
    assert isinstance(made, Candidate), made
    assert [lane.threads for lane in made.offer.lanes] == threads
    return made


@pytest.mark.parametrize(("threads", "lanes"), LANES)
def test_teams_compute_what_the_parts_do_on_all_threads(
    threads: int, lanes: str, target: Target, builder: Builder, rng: np.random.Generator
) -> None:
    many = for_threads(target, threads)
    candidate = proposed(lanes, many)
    kernel = check(candidate, many, builder, rng)
    group = candidate.group
    inputs = random_arrays(rng, group.input_types, specials=False)
    for i, value in enumerate(group.inputs):
        if value in GRAPH.constants:
            inputs[i] = GRAPH.constants[value].array
    found = run_kernel(kernel, group, candidate.offer, inputs, builder, threads=threads)
    for lane in lanes.split(" | "):
        for name, provider in (p.split() for p in lane.rpartition(": ")[2].split(" + ")):
            if provider == "onednn":
                continue  # on one thread it may add up in another order
            part = offered(name, provider, many)
            alone = PROVIDERS[provider].build(part.group, part.offer, many)
            assert isinstance(alone, Kernel)
            own = [inputs[group.inputs.index(value)] for value in part.group.inputs]
            results = run_kernel(alone, part.group, part.offer, own, builder, threads=threads)
            for value, result in zip(part.group.outputs, results, strict=True):
                np.testing.assert_array_equal(found[group.outputs.index(value)], result)


class Witness:
    """Kernels of a given body, which may write what it sees."""

    name, version = "witness", "1"

    def __init__(self, body: str) -> None:
        self.body = body

    def offer(self, group: Any, target: Target) -> list[Offer]:
        return [Offer(*group.plain_layouts)]

    def build(self, group: Any, offer: Offer, target: Target) -> Kernel:
        text = (
            '#include "korch_team.h"\nextern "C" int NAME_team(void* const* buffers, korch::Member& own) {\n'
            "  const long me = own.me, threads = own.threads;\n"
            "  const float* x = static_cast<const float*>(buffers[0]);\n"
            "  float *y = static_cast<float*>(buffers[1]), *room = static_cast<float*>(buffers[2]);\n"
            f"{self.body}\n  return 0;\n}}\n"
            'extern "C" int NAME_run(void*, void* const* buffers) {\n'
            "  return korch::run_region(THREADS, NAME_team, buffers);\n}\n"
        )
        text = text.replace("THREADS", str(target.threads))
        return named_kernel(text, threading=Threading.TEAM, workspace_bytes=512)


def witnessed(
    bodies: dict[int, str], lanes: list[int], target: Target, builder: Builder, threads: int = 0
) -> list[np.ndarray[Any, Any]]:
    """Return what kernels of some bodies, in lanes of as many threads, see."""
    g = Graph()
    for i in range(len(lanes)):
        g.output(f"y{i}", g.add("neg", [g.tensor(64, name=f"x{i}")]))
    graph = g.freeze()
    candidate, kernel = side_by_side(graph, bodies, lanes, target)
    inputs = [np.arange(64, dtype=np.float32)] * len(lanes)
    threads = threads or target.threads
    return run_kernel(kernel, candidate.group, candidate.offer, inputs, builder, threads=threads)


def side_by_side(
    graph: PrimitiveGraph, bodies: dict[int, str], lanes: list[int], target: Target
) -> tuple[Candidate, Kernel]:
    providers = [Witness(body) for body in bodies.values()]
    for i, provider in zip(bodies, providers, strict=True):
        provider.name = f"witness{i}"
    provider = ConcurrentProvider(providers)  # type: ignore[arg-type]
    parts = []
    for i in range(len(lanes)):
        group = make_group(graph, [i], [graph.primitives[i].output])
        parts.append([Candidate(group, f"witness{i}", Offer(*group.plain_layouts), "1")])
    made = provider.propose(graph, parts, target, lanes)
    assert isinstance(made, Candidate), made
    kernel = provider.build(made.group, made.offer, target)
    assert isinstance(kernel, Kernel), kernel
    return made, kernel


SEES = """
  room[0] = 0;
  if (me == 0) for (int i = 0; i < 64; ++i) y[i] = -1;
  own.meet();
  y[me] = me, y[8 + me] = threads;
  own.meet();
  y[16 + me] = y[8 + (me + 1) % threads];
"""


@pytest.mark.parametrize("lanes", [[3, 1], [1, 3], [2, 2], [3], [4], [2]])
def test_a_kernel_sees_the_threads_of_its_lane_alone(lanes: list[int], target: Target, builder: Builder) -> None:
    four = for_threads(target, 4)
    bodies = dict.fromkeys(range(len(lanes)), SEES)
    for count, y in zip(lanes, witnessed(bodies, lanes, four, builder), strict=True):
        assert y[:8].tolist() == [*range(count), *[-1] * (8 - count)]
        assert y[8:16].tolist() == y[16:24].tolist() == [count] * count + [-1] * (8 - count)


SUMS = """
  const long begin = korch::share(64, me, threads), end = korch::share(64, me + 1, threads);
  for (long turn = 0; turn < 400; ++turn) {
    for (long i = begin; i < end; ++i) room[i] = turn == 0 ? x[i] : y[i];
    own.meet();
    for (long i = begin; i < end; ++i) room[64 + i] = room[63 - i] + 1;
    own.meet();
    for (long i = begin; i < end; ++i) y[i] = room[64 + i];
  }
"""


@pytest.mark.parametrize(("threads", "lanes"), [(4, [3, 1]), (8, [5, 3]), (8, [2, 2, 2])])
def test_threads_of_a_team_wait_for_each_other(
    threads: int, lanes: list[int], target: Target, builder: Builder
) -> None:
    bodies = {i: SUMS.replace("turn < 400", f"turn < {400 + 2 * i}") for i in range(len(lanes))}
    for i, y in enumerate(witnessed(bodies, lanes, for_threads(target, threads), builder)):
        assert y.tolist() == (np.arange(64) + 400 + 2 * i).tolist()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_region_of_fewer_threads_gives_each_lane_one(threads: int, target: Target, builder: Builder) -> None:
    """As where a program calls a plan in a region of its own."""
    caller = builder.library(
        [
            'extern "C" int inside(int threads, int (*run)(void*, void* const*), void* const* a,\n'
            "                      void* const* b) {\n  int failed = 0;\n"
            "#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(| : failed)\n"
            "  for (int i = 0; i < 2; ++i) failed |= run(nullptr, i ? b : a);\n  return failed;\n}\n"
        ]
    )
    g = Graph()
    for i in range(2):
        g.output(f"y{i}", g.add("neg", [g.tensor(64, name=f"x{i}")]))
    _, kernel = side_by_side(g.freeze(), {0: SEES, 1: SUMS}, [3, 2], for_threads(target, 5))
    library = ctypes.CDLL(str(builder.library([kernel.source])))
    memory = np.zeros((2, 4, 64), np.float32)
    memory[:, :2] = np.arange(64)
    rooms = np.zeros((2, 512), np.float32)
    buffers = [
        (ctypes.c_void_p * 5)(*(row.ctypes.data for row in own), room.ctypes.data)
        for own, room in zip(memory, rooms, strict=True)
    ]
    run = getattr(library, kernel.symbol + "_run")
    assert ctypes.CDLL(str(caller)).inside(threads, run, *buffers) == 0
    for _, _, seen, summed in memory[:threads] if threads == 1 else memory:
        assert summed.tolist() == (np.arange(64) + 400).tolist()
        assert seen[8:11].tolist() == ([3, 3, 3] if threads == 1 else [1, -1, -1])


def plain(name: str, provider: str, target: Target) -> Candidate:
    count = len(PROVIDERS[provider].offer(offered(name, provider, target).group, target))
    found = (offered(name, provider, target, place) for place in range(count))
    return next(c for c in found if all(x.is_plain for _, x in (*c.input_ports, *c.output_ports)))


def whole_plan(target: Target, builder: Builder, has_teams: bool) -> Artifact:
    """Return an artifact that runs all parts that lie plain, in teams or one after the other."""

    def of(name: str, provider: str) -> Candidate:
        return plain(name, provider, target)

    lanes = [
        ([[of("small", "onednn")], [of("two", "generated")]], [1, 3]),
        ([[of("product", "gemm"), of("total", "generated")], [of("heads", "attention")]], [2, 2]),
        ([[of("deep", "onednn")]], [1]),
    ]
    steps = []
    for parts, threads in lanes:
        if not has_teams:
            for part in (part for lane in parts for part in lane):
                alone = PROVIDERS[part.provider].build(part.group, part.offer, target)
                assert isinstance(alone, Kernel)
                steps.append(PlanStep(part, alone))
            continue
        made = CONCURRENT.propose(PLAIN, parts, target, threads)
        assert isinstance(made, Candidate), made
        steps.append(PlanStep(made, built(made, target)))
    return build(PLAIN, steps, target, builder)


def test_a_plan_with_teams_computes_what_the_model_does(
    target: Target, builder: Builder, rng: np.random.Generator, tmp_path: Path
) -> None:
    four = for_threads(target, 4)
    artifact = whole_plan(four, builder, has_teams=True)
    assert "korch_concurrent.h" in artifact.sources
    Executable(artifact).save(tmp_path / "m.korch")
    executables = Executable.load(tmp_path / "m.korch"), Executable(artifact)
    after = Executable(whole_plan(four, builder, has_teams=False))
    arrays = [rng.standard_normal(t.shape, np.float32) for t in after.get_inputs()]
    names = [tensor.name for tensor in after.get_inputs()]
    expected = reference.run(PLAIN, dict(zip(names, arrays, strict=True)), exact=True)
    turns = dict(zip((t.name for t in after.get_outputs()), after(*arrays), strict=True))

    def check_run(i: int) -> None:
        """Calls from several threads, of one executable and of another."""
        executable = executables[i % 2]
        for tensor, actual in zip(executable.get_outputs(), executable(*arrays), strict=True):
            assert_same(actual, expected[tensor.name], family="composite", terms=144, name=tensor.name)
            if not tensor.name.startswith(("small", "deep")):  # oneDNN's on one thread
                np.testing.assert_array_equal(actual, turns[tensor.name])

    check_run(0)
    unpack(tmp_path / "m.korch", tmp_path / "folder")
    (library,) = load_plans((tmp_path / "folder" / "library.so").read_bytes(), ("dnnl",))
    handle = Handle(library, artifact.weights, 4)
    outputs = [np.empty(t.shape, np.float32) for t in after.get_outputs()]
    handle.run([a.ctypes.data for a in arrays], [a.ctypes.data for a in outputs])
    for name, actual, told in zip(turns, outputs, executables[0](*arrays), strict=True):
        np.testing.assert_array_equal(actual, told, err_msg=name)
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(check_run, i) for i in range(12)]:
            done.result()
    text = explain(artifact.plan, Report())
    assert "conv | 3: add sigmoid" in text
    assert re.search(r"2: matmul tanh \+ reduce_sum \| 2: matmul", text)


@pytest.mark.skipif(platform.system() != "Linux", reason="threads are counted in /proc")
def test_no_thread_stays_behind(tmp_path: Path, target: Target, builder: Builder) -> None:
    """In a process of its own: other tests leave threads of OpenMP's in this one."""
    four = for_threads(target, 4)
    for name, has_teams in (("teams", True), ("turns", False)):
        Executable(whole_plan(four, builder, has_teams)).save(tmp_path / f"{name}.korch")
    script = """
import os, sys, time
import numpy as np
from korch.runtime.executable import Executable
def count(wanted=0):
    for _ in range(500):  # what read the weights has ended, but the system may need a moment
        found = len(os.listdir("/proc/self/task"))
        if not wanted or found == wanted:
            break
        time.sleep(0.02)
    return found
def run(name, wanted=0):
    executable = Executable.load(name)
    arrays = [np.ones(t.shape, np.float32) for t in executable.get_inputs()]
    for _ in range(20):
        executable(*arrays)
    return count(wanted)
turns = min(run(sys.argv[1]) for _ in range(3))
teams = [run(sys.argv[2], turns) for _ in range(3)]
print(turns, *teams, count(turns), run(sys.argv[1], turns))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "turns.korch", tmp_path / "teams.korch"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    counts = [int(n) for n in done.stdout.split()]
    assert len(counts) == 6 and len(set(counts)) == 1, counts


def test_a_part_that_fails_leaves_its_team_free(target: Target, builder: Builder) -> None:
    g = Graph()
    for i in range(2):
        g.output(f"y{i}", g.add("neg", [g.tensor(64, name=f"x{i}")]))
    graph = g.freeze()
    fails = f"{SEES}\n  if (x[0] < 0) return 1;\n  x = y;"
    four = for_threads(target, 4)
    made, kernel = side_by_side(graph, {0: fails, 1: SUMS}, [2, 2], four)
    executable = Executable(build(graph, [PlanStep(made, kernel)], four, builder))
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
        assert seen[8:12].tolist() == [2, 2, -1, -1]


@needs_watching
def test_the_threads_of_teams_are_seen_once(target: Target, builder: Builder, tmp_path: Path) -> None:
    path = tmp_path / "m.korch"
    Executable(whole_plan(for_threads(target, 4), builder, has_teams=True)).save(path)
    watched = watch_threads(path, 4, rounds=20).runs
    # Where other processes want the cores, the caller works alone for a while.
    runs = [run for run in watched if len({span.thread for span in run.spans}) > 1]
    assert runs
    for run in runs:
        seen = sorted((span.kernel, span.thread) for span in run.spans if span.kernel < 2)
        assert seen == [(kernel, thread) for kernel in (0, 1) for thread in range(4)]
        for span in run.spans:
            assert 0 <= span.wait_ns <= span.end_ns - span.begin_ns
        assert all(s.wait_ns > 0 for s in run.spans if (s.kernel, s.thread) == (1, 1))  # between the parts of its lane


def test_what_can_not_run_in_a_team_is_refused(target: Target) -> None:
    four = for_threads(target, 4)

    def reason(threading: Threading, **more: Any) -> str | None:
        refusal = team_refusal(Kernel("k", "", threading=threading, **more))
        return refusal and refusal.reason

    assert reason(Threading.CALLER) is reason(Threading.TEAM) is None
    assert reason(Threading.OWN) == "the kernel has threads of its own"
    library = "a kernel with a state or a library may have threads of its own"
    assert reason(Threading.TEAM, libraries=("dnnl",)) == reason(Threading.TEAM, has_state=True) == library
    made = CONCURRENT.propose(GRAPH, [[offered("small", "onednn", four)]], four, [2])
    assert isinstance(made, Candidate)
    assert CONCURRENT.build(made.group, made.offer, four) == Refusal(library)
    total = offered("total", "generated", four)
    found = CONCURRENT.propose(GRAPH, [[total], [offered("product", "gemm", four)]], four, [3, 2])
    assert found == Refusal("there are only 4 threads")


def test_headers_of_kernels_open_no_regions() -> None:
    others = {"korch_timer.cpp", "korch_threads.cpp", "korch_runtime.h", "korch_concurrent.h", "korch_team.h"}
    for path in NATIVE_FOLDER.iterdir():
        assert path.name in others or "#pragma omp" not in path.read_text("utf-8")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_kernels_run_on_the_threads_that_they_declare(threads: int, target: Target) -> None:
    some = for_threads(target, threads)
    found = set()
    parts = [
        ("product", "gemm"),
        ("total", "generated"),
        ("deep", "conv"),
        ("heads", "attention"),
        ("rounded", "winograd"),
    ]
    for name, provider in parts:
        candidate = offered(name, provider, some)
        kernel = PROVIDERS[provider].build(candidate.group, candidate.offer, some)
        assert isinstance(kernel, Kernel)
        assert "#pragma omp" not in kernel.source
        assert (f"int {kernel.symbol}_team(" in kernel.source) == (kernel.threading is Threading.TEAM)
        found.add(kernel.threading)
    assert (Threading.TEAM in found) == (threads > 1)


def test_stages_of_generated_kernels_wait(target: Target, builder: Builder, rng: np.random.Generator) -> None:
    """A softmax down the columns and one along the rows: several stages, each with a barrier."""
    g = Graph()
    for i, axis in enumerate((0, 1)):
        x = g.tensor(96, 80, name=f"x{i}")
        wide = BroadcastAttributes((96, 80))

        def reduced(kind: str, value: int, axis: int = axis, wide: Any = wide) -> int:
            found = g.add(kind, [value], ReduceAttributes((axis,)))
            return g.add("broadcast", [found], wide)

        power = g.add("exp", [g.add("sub", [x, reduced("reduce_max", x)])])
        g.output(f"y{i}", g.add("div", [power, reduced("reduce_sum", power)]))
    graph = g.freeze()
    four = for_threads(target, 4)
    lanes = []
    for half in np.array_split(range(len(graph.primitives)), 2):
        group = make_group(graph, half.tolist(), [graph.primitives[int(half[-1])].output])
        offers = PROVIDERS["generated"].offer(group, four)
        assert not isinstance(offers, Refusal)
        lanes.append([Candidate(group, "generated", offers[0], "1")])
    made = CONCURRENT.propose(graph, lanes, four, [2, 2])
    kernel = check(made, four, builder, rng, graph)
    assert kernel.source.count("korch::run_region(") == 2
