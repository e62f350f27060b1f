"""The software prefetches of loops: of what reductions read from memory."""

import pytest

from korch.provider.generated import GeneratedProvider
from korch.target import Target
from korch.tile.analysis.fetch import fetched_ahead
from korch.tile.analysis.stages import large_inputs
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.support.fuzz_kernels import cases_of, check_cases
from tests.tile.tile_groups import Graph, offers_of

WIDE = Target(isa="avx512", lanes=16, threads=2)


@pytest.mark.parametrize(("text", "least", "ahead"), [("f32[300,16]", 1, [2048]), ("f32[300,16]", 1 << 20, [])])
def test_reductions_of_consecutive_lines_fetch_large_inputs_from_memory(text, least, ahead):
    g = Graph()
    group = g.group(g.reduce("sum", g.tensor(text), 0))
    offer = offers_of(group, WIDE)[0]
    program = lower(group.body, offer.inputs, offer.outputs, Machine.of(WIDE))
    large = large_inputs(program, least)
    passes = [pass_ for stage in program.stages for pass_ in stage.passes]
    assert [n for one in passes if one.is_reduction for n in fetched_ahead(one, large).values()] == ahead


@pytest.mark.parametrize("kind", ["f16", "bf16", "f64", "i8", "u8"])
def test_every_type_is_fetched_ahead(kind, target, builder, rng):
    """Elements of 16 bits are converted at the load, whichever kind of load it is."""
    g = Graph()
    group = g.group(g.reduce("max", g.tensor(f"{kind}[64,128]"), 0))
    cases = cases_of([group], (GeneratedProvider(least_stream_bytes=1),), target, rng, each=9)
    assert list(map(str, check_cases(cases, builder, rng))) == []
