"""Kernels side by side on one thread each, compiled, run and compared with the reference.

`test_teams.py` tests kernels side by side on several threads each.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Group, Refusal, make_group, make_layout_change
from korch.candidate.lane import Lane, LanePart
from korch.candidate.layout import Layout
from korch.measure.compiler import Builder
from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.ops.winograd import WinogradAttributes, transform_weights
from korch.provider.concurrent import ConcurrentProvider
from korch.provider.provider import Kernel, Provider, load_providers
from korch.report.explain import explain
from korch.report.threads import watch_threads
from korch.runtime.artifact import Artifact
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.runtime.program import PlanStep
from korch.runtime.report import Report
from korch.target import Target
from korch.testing.kernels import check_kernel
from korch.testing.samples import random_arrays
from korch.testing.tolerance import assert_same
from tests.provider.onednn_groups import Graph

PROVIDERS: dict[str, Provider[Target, Kernel]] = {p.name: p for p in load_providers()}
CONCURRENT = ConcurrentProvider(tuple(PROVIDERS.values()))

needs_watching = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("g++") is None,
    reason="libraries are preloaded on Linux, and regions are those of GCC's OpenMP",
)


def graph_with_parts() -> tuple[PrimitiveGraph, dict[str, Group]]:
    """Convolutions, a product, a sum, a kernel with two outputs, Winograd's space, attention."""
    g = Graph()
    image, other, rows = g.tensor(1, 16, 9, 13), g.tensor(1, 16, 9, 13), g.tensor(7, 24)
    same = ((1, 1), (1, 1), (1, 1), (1, 1))
    small = g.add("conv", [image, g.weights(5, 16, 1, 1)], ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1), 1))
    deep = g.add("conv", [other, g.weights(16, 1, 3, 3)], ConvAttributes(*same, 16))
    biased = g.with_tensor("add", deep, g.weights(1, 16, 1, 1))
    product = g.add("matmul", [rows, g.weights(24, 33)])
    active = g.add("tanh", [product])
    total = g.add("reduce_sum", [rows], ReduceAttributes((1,)))
    spread = g.with_tensor("add", other, image)
    gate = g.add("sigmoid", [spread])
    weights = transform_weights(g.rng.standard_normal((16, 16, 3, 3)) / 9, 4).astype(np.float32)
    space = WinogradAttributes(4, (1, 1), (1, 1))
    rounded = g.add("winograd", [image, g.constant(np.ascontiguousarray(weights))], space)
    scores = g.add("matmul", [g.tensor(2, 48, 16), g.tensor(2, 16, 21)])
    last, wide = ReduceAttributes((2,)), BroadcastAttributes((2, 48, 21))
    top = g.add("broadcast", [g.add("reduce_max", [scores], last)], wide)
    power = g.add("exp", [g.add("sub", [scores, top])])
    sums = g.add("broadcast", [g.add("reduce_sum", [power], last)], wide)
    heads = g.add("matmul", [g.add("div", [power, sums]), g.tensor(2, 21, 16)])
    names = {
        "small": (small,),
        "deep": (biased,),
        "product": (active,),
        "total": (total,),
        "two": (spread, gate),
        "rounded": (rounded,),
        "heads": (heads,),
    }
    for name, values in names.items():
        for i, value in enumerate(values):
            g.output(f"{name} {i}", value)
    graph = g.freeze()
    maker = {p.output: i for i, p in enumerate(graph.primitives)}

    def behind(values: Sequence[int]) -> set[int]:
        found: set[int] = set()
        waiting = [maker[v] for v in values]
        while waiting:
            p = waiting.pop()
            found.add(p)
            waiting += [maker[v] for v in graph.primitives[p].inputs if v in maker]
        return found

    of = dict(graph.outputs)
    values = {name: [of[f"{name} {i}"] for i in range(len(v))] for name, v in names.items()}
    return graph, {name: make_group(graph, behind(v), v) for name, v in values.items()}


GRAPH, GROUPS = graph_with_parts()
PLAIN = replace(GRAPH, outputs=tuple(o for o in GRAPH.outputs if not o[0].startswith("rounded")))
"""Without the part that no provider writes in a plain layout."""


def offered(name: str, provider: str, target: Target, place: int = 0) -> Candidate:
    offers = PROVIDERS[provider].offer(GROUPS[name], target)
    assert not isinstance(offers, Refusal), offers
    return Candidate(GROUPS[name], provider, offers[place], PROVIDERS[provider].version)


def built(candidate: Candidate | Refusal, target: Target) -> Kernel:
    assert isinstance(candidate, Candidate), candidate
    kernel = CONCURRENT.build(candidate.group, candidate.offer, target)
    assert isinstance(kernel, Kernel), kernel
    return kernel


def check(
    candidate: Candidate | Refusal,
    target: Target,
    builder: Builder,
    rng: np.random.Generator,
    graph: PrimitiveGraph = GRAPH,
) -> Kernel:
    kernel = built(candidate, target)
    assert isinstance(candidate, Candidate)
    inputs = random_arrays(rng, candidate.group.input_types, specials=False)
    for i, value in enumerate(candidate.group.inputs):
        if value in graph.constants:
            inputs[i] = graph.constants[value].array
    check_kernel(kernel, candidate.group, candidate.offer, inputs, builder)
    return kernel


LANES = [
    ["small onednn", "product onednn"],
    ["small conv", "deep conv"],
    ["product gemm", "total generated"],
    ["small onednn", "two generated"],
    ["deep conv", "product gemm + total generated"],
    ["two generated + total generated", "small onednn + product gemm"],
    ["small onednn"],
    ["two generated"],
    ["product gemm + deep conv"],
    ["rounded winograd", "heads attention"],
]


@pytest.mark.parametrize("lanes", LANES, ids=" | ".join)
def test_lanes_compute_what_their_parts_do(
    lanes: list[str], target: Target, builder: Builder, rng: np.random.Generator
) -> None:
    parts = [[offered(*part.split(), target) for part in lane.split(" + ")] for lane in lanes]
    kernel = check(CONCURRENT.propose(GRAPH, parts, target), target, builder, rng)
    assert kernel.has_state == ("onednn" in " ".join(lanes))
    assert kernel.libraries == (("dnnl",) if kernel.has_state else ())


def test_one_kernel_twice_is_compiled_once(target: Target, builder: Builder, rng: np.random.Generator) -> None:
    g = Graph()
    for name in ("a", "b"):
        g.output(name, g.add("tanh", [g.add("exp", [g.tensor(5, 7, name=f"x{name}")])]))
    graph = g.freeze()
    outputs = [value for _, value in graph.outputs]
    groups = make_group(graph, [0, 1], outputs[:1]), make_group(graph, [2, 3], outputs[1:])
    offers = PROVIDERS["generated"].offer(groups[0], target)
    assert not isinstance(offers, Refusal)
    lanes = [[Candidate(group, "generated", offers[0])] for group in groups]
    kernel = check(CONCURRENT.propose(graph, lanes, target), target, builder, rng, graph)
    assert kernel.source.count(f'extern "C" int {kernel.symbol}_0_run') == 1
    assert f"{kernel.symbol}_1" not in kernel.source


def test_a_change_of_layout_beside_a_convolution(target: Target, builder: Builder, rng: np.random.Generator) -> None:
    image = GROUPS["small"].inputs[0]
    change = make_layout_change(GRAPH, image)
    offers = PROVIDERS["generated"].offer(change, target)
    assert not isinstance(offers, Refusal)
    offer = next(o for o in offers if o.inputs[0].is_plain and not o.outputs[0].is_plain)
    lanes = [[Candidate(change, "generated", offer)], [offered("total", "generated", target)]]
    check(CONCURRENT.propose(GRAPH, lanes, target), target, builder, rng)


def test_parts_have_memory_of_their_own(target: Target) -> None:
    lanes = [[offered("product", "onednn", target)], [offered("small", "conv", target)]]
    kernel = built(CONCURRENT.propose(GRAPH, lanes, target), target)
    alone = [built(CONCURRENT.propose(GRAPH, [lane], target), target) for lane in lanes]
    assert kernel.workspace_bytes == sum(part.workspace_bytes for part in alone)
    assert all(part.workspace_bytes % 64 == 0 for part in alone)
    assert "THREADS = 2" not in kernel.source


def test_what_is_proposed_is_refused_where_it_can_not_be(target: Target) -> None:
    def refusal(*lanes: Sequence[Candidate], on: Target = target) -> str:
        found = CONCURRENT.propose(GRAPH, lanes, on)
        assert isinstance(found, Refusal)
        return found.reason

    total, two = offered("total", "generated", target), offered("two", "generated", target)
    assert refusal([total], [two], on=replace(target, threads=1)) == "there are only 1 threads"
    assert refusal([total], [total]) == "two parts write a value"
    assert refusal([replace(total, provider="no")]) == "there is no provider no"
    odd = replace(total.offer, variant="odd")
    text = "generated offers no such kernel for one thread"
    assert refusal([replace(total, offer=odd)]) == text
    plain = offered("small", "onednn", target)
    image = two.group.inputs.index(plain.group.inputs[0])
    other = next(
        candidate
        for place in range(len(PROVIDERS["generated"].offer(two.group, target)))
        if (candidate := offered("two", "generated", target, place)).offer.inputs[image] != plain.offer.inputs[0]
    )
    assert refusal([plain], [other]) == "two parts read a value in different layouts"


def test_offers_of_other_lanes_are_refused(target: Target) -> None:
    made = CONCURRENT.propose(GRAPH, [[offered("total", "generated", target)]], target)
    assert isinstance(made, Candidate)
    part = LanePart("generated", "", 1)
    odd = replace(part, variant="odd")
    rows: list[tuple[tuple[Lane, ...], str]] = [
        ((), "it names no kernels to run side by side"),
        ((Lane((LanePart("absent", "", 1),)),), "there is no provider absent"),
        ((Lane((odd,)),), "generated offers no such kernel for one thread"),
        ((Lane((odd,), 2),), "generated offers no such kernel for 2 threads"),
        ((Lane((part,), 2), Lane((part,))), "there are only 2 threads"),
    ]
    for lanes, reason in rows:
        offer = replace(made.offer, lanes=lanes)
        assert CONCURRENT.build(made.group, offer, target) == Refusal(reason)
    assert isinstance(CONCURRENT.offer(made.group, target), Refusal)


def whole_plan(target: Target, builder: Builder) -> Artifact:
    """Return the artifact of all parts that lie plain, side by side."""

    def plain(name: str, provider: str) -> Candidate:
        count = len(PROVIDERS[provider].offer(GROUPS[name], target))
        found = (offered(name, provider, target, place) for place in range(count))
        return next(c for c in found if all(x.is_plain for _, x in (*c.input_ports, *c.output_ports)))

    lanes = [
        [[plain("small", "onednn")], [plain("two", "generated")]],
        [[plain("product", "gemm"), plain("total", "generated")], [plain("deep", "onednn")]],
    ]
    lanes.append([[plain("heads", "attention")]])
    steps = []
    for each in lanes:
        candidate = CONCURRENT.propose(GRAPH, each, target)
        assert isinstance(candidate, Candidate), candidate
        steps.append(PlanStep(candidate, built(candidate, target)))
    return build(PLAIN, steps, target, builder)


def test_a_plan_with_sets_computes_what_the_model_does(
    target: Target, builder: Builder, rng: np.random.Generator
) -> None:
    artifact = whole_plan(target, builder)
    executable = Executable(artifact)
    arrays = [rng.standard_normal(t.shape, np.float32) for t in executable.get_inputs()]
    names = [tensor.name for tensor in executable.get_inputs()]
    expected = reference.run(PLAIN, dict(zip(names, arrays, strict=True)), exact=True)

    def check_run() -> None:
        for tensor, actual in zip(executable.get_outputs(), executable(*arrays), strict=True):
            assert_same(actual, expected[tensor.name], family="composite", terms=144, name=tensor.name)

    check_run()
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(check_run) for _ in range(9)]:
            done.result()
    text = explain(artifact.plan, Report())
    assert "conv | add sigmoid" in text and "matmul tanh + reduce_sum | conv add" in text


@needs_watching
def test_the_threads_of_a_set_are_seen_once(target: Target, builder: Builder, tmp_path: Path) -> None:
    path = tmp_path / "m.korch"
    Executable(whole_plan(target, builder)).save(path)
    for run in watch_threads(path, 2, rounds=3).runs:
        # Attention runs alone on the calling thread, in no parallel region.
        assert sorted((span.kernel, span.thread) for span in run.spans) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_key_says_how_each_part_is_made(target: Target) -> None:
    first = [[offered("small", "onednn", target)], [offered("product", "gemm", target)]]
    again = [[offered("small", "onednn", target)], [offered("product", "onednn", target)]]
    turned = [[offered("small", "onednn", target), offered("product", "gemm", target)]]
    newer = [first[0], [replace(first[1][0], version="99")]]
    made = [CONCURRENT.propose(GRAPH, lanes, target) for lanes in (first, again, turned, newer)]
    assert len({c.key for c in made if isinstance(c, Candidate)}) == 4


def test_the_text_of_a_lane_names_threads_providers_variants_and_outputs() -> None:
    parts = (LanePart("gemm", "", 1), LanePart("conv", "rows", 2))
    assert str(Lane(parts, 12)) == "12: gemm + conv:rows*2"
    assert str(Lane((LanePart("a-b.c", "", 3),))) == "a-b.c*3"


def test_a_part_that_fails_to_be_created_says_so(target: Target, builder: Builder) -> None:
    class Broken:
        name, version = "broken", "1"

        def offer(self, group: Group, target: Target) -> object:
            return PROVIDERS["generated"].offer(group, target)

        def build(self, group: Group, offer: object, target: Target) -> Kernel:
            source = (
                '#include <stdio.h>\nextern "C" void* k_b_create(int threads, char* e, size_t n) '
                '{ snprintf(e, n, "no %d", threads); return nullptr; }\n'
                'extern "C" int k_b_run(void*, void* const*) { return 0; }\n'
                'extern "C" void k_b_destroy(void*) {}\n'
            )
            return Kernel("k_b", source, has_state=True)

    provider = ConcurrentProvider([Broken(), PROVIDERS["onednn"]])  # type: ignore[list-item]
    total = replace(offered("total", "generated", target), provider="broken")
    made = provider.propose(GRAPH, [[offered("small", "onednn", target)], [total]], target)
    assert isinstance(made, Candidate)
    kernel = provider.build(made.group, made.offer, target)
    assert isinstance(kernel, Kernel)
    with pytest.raises(AssertionError, match="no 1"):
        inputs = random_arrays(np.random.default_rng(0), made.group.input_types, specials=False)
        check_kernel(kernel, made.group, made.offer, inputs, builder)


def test_offers_are_those_for_the_target(target: Target) -> None:
    class Picky:
        name, version = "picky", "1"

        def offer(self, group: Group, target: Target) -> object:
            offers = PROVIDERS["generated"].offer(group, target)
            return offers if target.cpu == "right" else Refusal("it is another machine")

    provider = ConcurrentProvider([Picky()])  # type: ignore[list-item]
    total = replace(offered("total", "generated", target), provider="picky")
    for cpu, kind in (("wrong", Refusal), ("right", Candidate), ("wrong", Refusal)):
        assert isinstance(provider.propose(GRAPH, [[total]], replace(target, cpu=cpu)), kind)


def test_layouts_of_constants_may_differ_on_one_thread(target: Target) -> None:
    candidate = offered("product", "gemm", target)
    position = next(iter(candidate.group.constant_inputs))
    inputs = tuple(Layout.plain(2) if i == position else layout for i, layout in enumerate(candidate.offer.inputs))
    other = replace(candidate, offer=replace(candidate.offer, inputs=inputs))
    made = CONCURRENT.propose(GRAPH, [[other]], target)
    assert isinstance(made, Candidate)
    assert made.offer.inputs == candidate.offer.inputs


def test_variants_on_one_thread_have_the_layouts_of_the_kernel_and_begin_with_its_own(target: Target) -> None:
    few = replace(target, threads=1)
    for name, provider in (("deep", "conv"), ("product", "gemm"), ("rounded", "winograd"), ("two", "generated")):
        for place in range(len(PROVIDERS[provider].offer(GROUPS[name], target))):
            candidate = offered(name, provider, target, place)
            found = CONCURRENT.variants(candidate, few)
            offers = PROVIDERS[provider].offer(GROUPS[name], few)
            assert not isinstance(offers, Refusal) and {c.offer for c in found} <= set(offers)
            assert all(
                (c.input_ports, c.output_ports) == (candidate.input_ports, candidate.output_ports) for c in found
            )
            assert len({c.offer for c in found}) == len(found)
            if candidate.offer.variant in {offer.variant for offer in offers}:
                assert found[0].offer.variant == candidate.offer.variant
    assert CONCURRENT.variants(replace(candidate, provider="absent"), few) == ()
