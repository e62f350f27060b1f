"""The software prefetches of loops: of lines that will be written, and of what reductions read from memory."""

import pytest

from korch.provider.generated import GeneratedProvider
from korch.target import Target
from korch.tile.analysis.fetch import Fetches, fetches_of
from korch.tile.analysis.stages import large_inputs, streamed_outputs
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.support.fuzz_kernels import cases_of, check_cases
from tests.tile.tile_groups import Graph, Group, offers_of, softmax

WIDE = Target(isa="avx512", lanes=16, threads=2)


def fetches(group: Group, stream_bytes: int = 0) -> list[Fetches]:
    """Return what the passes of a kernel prefetch, as if values of at least this size were large."""
    offer = offers_of(group, WIDE)[0]
    program = lower(group.body, offer.inputs, offer.outputs, Machine(WIDE.lanes, WIDE.threads))
    large = streamed_outputs(program, stream_bytes), large_inputs(program, stream_bytes)
    return [fetches_of(program, stage, pass_, *large) for stage in program.stages for pass_ in stage.passes]


@pytest.mark.parametrize(("text", "least", "ahead"), [("f32[300,16]", 1, [2048]), ("f32[300,16]", 1 << 20, [])])
def test_reductions_of_consecutive_lines_fetch_large_inputs_from_memory(text, least, ahead):
    g = Graph()
    found = fetches(g.group(g.reduce("sum", g.tensor(text), 0)), stream_bytes=least)
    assert [n for one in found for n in one.read.values()] == ahead


@pytest.mark.parametrize("kind", ["f16", "bf16", "f64", "i8", "u8", "bool"])
def test_every_type_is_fetched_ahead(kind, target, builder, rng):
    """Elements of 16 bits are converted at the load, whichever kind of load it is."""
    if kind in ("f16", "bf16", "f64"):
        g = Graph()
        x = g.add("add", [g.tensor(f"{kind}[64,128]"), g.tensor(f"{kind}[64,128]")])
        d = g.add("sub", [x, g.wide(g.mean(x, 1), (64, 128))])
        variance = g.wide(g.mean(g.add("mul", [d, d]), 1), (64, 128))
        groups = [softmax(f"{kind}[64,128]", 1), g.group(g.add("div", [d, g.add("exp", [variance])]))]
    else:
        g = Graph()
        groups = [g.group(g.transpose(g.tensor(f"{kind}[64,128]"), 1, 0))]
    providers = (GeneratedProvider(), GeneratedProvider(least_stream_bytes=1))
    cases = cases_of(groups, providers, target, rng, each=9)
    assert list(map(str, check_cases(cases, builder, rng))) == []


def written(group: Group, stream_bytes: int = 1 << 30) -> list[list[int]]:
    """Return for each pass how far ahead lines are fetched to be written."""
    return [[n for _, _, n in one.written] for one in fetches(group, stream_bytes)]


@pytest.mark.parametrize(
    ("text", "ahead"),
    [
        ("f32[32768]", 256),
        ("f32[32767]", 0),  # the ends of threads' shares would outweigh it
        ("f64[40000]", 128),
        ("f32[4,20000]", 256),
        ("f32[2000,40]", 256),
        ("i8[400,1000]", 1024),
    ],
)
def test_large_outputs_are_fetched_to_be_written(text, ahead):
    g = Graph()
    assert written(g.group(g.add("abs", [g.tensor(text)]))) == [[ahead] if ahead else []]


def test_what_goes_past_the_caches_is_not_fetched_to_be_written():
    g = Graph()
    assert written(g.group(g.add("abs", [g.tensor("f32[99999]")])), stream_bytes=0) == [[]]
