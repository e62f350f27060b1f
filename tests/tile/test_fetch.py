"""The software prefetches of loops: from memory, and for the next task."""

import re

import pytest

from korch.provider.generated import GeneratedProvider
from korch.target import Target
from korch.tile.cpp.print import print_cpp
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.support.fuzz_kernels import cases_of, check_cases
from tests.tile.tile_groups import Graph, Group, normalization, offers_of, softmax

WIDE = Target(isa="avx512", lanes=16, threads=2)


def source_of(group: Group, variant: str = "", stream_bytes: int = 0) -> str:
    """Return a kernel's text as if its values were large."""
    offer = next(offer for offer in offers_of(group, WIDE) if offer.variant == variant)
    machine = Machine(WIDE.lanes, WIDE.threads)
    program = lower(group.body, offer.inputs, offer.outputs, machine, variant == "keep")
    return print_cpp(program, "", WIDE.lanes, WIDE.threads, stream_bytes)[1]


def far(source: str) -> list[int]:
    """Return how many elements ahead loads fetch from memory."""
    return [int(n) for n in re.findall(r"load_far<[^(]*\(.*?, (\d+)\);", source)]


@pytest.mark.parametrize(
    ("shape", "start", "size", "ahead"),
    [
        ((64, 2304), (0, 768), (64, 768), [3 * 2304]),  # rows to come, not what lies between them
        ((64, 2304), (0, 0), (64, 2304), [2048]),
        ((4, 40000), (0, 8), (4, 39000), [2048]),
        ((8, 2304), (0, 768), (8, 768), []),  # too few rows
    ],
)
def test_memory_is_fetched_as_far_ahead_as_it_is_read(shape, start, size, ahead):
    g = Graph()
    x = g.add("neg", [g.tensor(f"f32{list(shape)}")])
    assert far(source_of(g.group(g.slice(x, start, size, (1, 1))))) == ahead


def test_only_large_inputs_are_fetched_from_memory():
    g = Graph()
    x = g.tensor("f32[64,1024]")
    group = g.group(g.add("mul", [x, g.wide(g.tensor("f32[1024]"), (64, 1024))]))
    assert len(far(source_of(group, stream_bytes=1 << 16))) == 1
    assert not far(source_of(group, stream_bytes=1 << 20))


def test_reductions_fetch_nothing_from_memory():
    """They do not write past the caches, so the hardware keeps pace."""
    g = Graph()
    group = g.group(g.reduce("sum", g.tensor("f32[64,3136]"), 1))
    assert "prefetch" not in source_of(group) and not far(source_of(group))


@pytest.mark.parametrize("variant", ["", "keep"])
def test_the_pass_that_writes_past_the_caches_fetches_the_next_rows(variant):
    """Instead of the second pass, which does where it stays in them."""
    group = softmax("f32[128,64,128]", 2)
    for stream_bytes, near, beside in ((1 << 30, 1, 0), (0, 0, 1)):
        source = source_of(group, variant, stream_bytes)
        assert source.count("korch::load_ahead<") == near
        assert source.count("korch::fetch<W>(i0 ") == beside
        assert not far(source)
    last = source_of(group, variant).rsplit("korch::fetch<W>", 1)[1]
    assert "korch::stream<" in last and "korch::store<" not in last


@pytest.mark.parametrize("kind", ["f16", "bf16", "f64", "i8", "u8", "bool"])
def test_every_type_is_fetched_ahead(kind, target, builder, rng):
    """Elements of 16 bits are converted at the load, whichever kind of load it is."""
    if kind in ("f16", "bf16", "f64"):
        g = Graph()
        x = g.add("add", [g.tensor(f"{kind}[64,128]"), g.tensor(f"{kind}[64,128]")])
        d = g.add("sub", [x, g.wide(g.mean(x, 1), (64, 128))])
        variance = g.wide(g.mean(g.add("mul", [d, d]), 1), (64, 128))
        groups = [softmax(f"{kind}[64,128]", 1), g.group(g.add("div", [d, g.add("exp", [variance])]))]
        sources = [source_of(group, stream_bytes=1 << 30) for group in groups]
        assert all("korch::load_ahead<" in source for source in sources)
    else:
        g = Graph()
        groups = [g.group(g.transpose(g.tensor(f"{kind}[64,128]"), 1, 0))]
    providers = (GeneratedProvider(), GeneratedProvider(least_stream_bytes=1))
    cases = cases_of(groups, providers, target, rng, each=9)
    assert list(map(str, check_cases(cases, builder, rng))) == []


def test_small_vectors_are_not_fetched_beside_rows():
    source = source_of(normalization("f32[128,256]", (1,), affine=(1,)))
    assert source.count("korch::fetch<W>(") == 1


def test_squares_to_come_are_fetched(monkeypatch):
    """From two levels; where a tile reads contiguous memory, from farther ahead."""
    monkeypatch.setattr("korch.tile.lower.loops.LARGE_ELEMENTS", 0)
    for text, ahead in (("f32[4,64,1600]", [16, 64]), ("f32[4,1600,64]", [1024])):
        g = Graph()
        source = source_of(g.group(g.transpose(g.tensor(text), 0, 2, 1)))
        starts = re.findall(r"load_across<[^(]*\(.*?, i0 \+ (.*), \d+\);", source)
        found = re.findall(r"fetch(?:_far)?_across<W>\(i0 \+ (.*), \d+\);", source)
        assert found == [f"{starts[0]} + {n}" for n in ahead]


def written(source: str) -> list[str]:
    """Return the places that are fetched to be written."""
    return re.findall(r"fetch_to_write<W>\((.*)\);", source)


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
    source = source_of(g.group(g.add("abs", [g.tensor(text)])), stream_bytes=1 << 30)
    (place,) = re.findall(r"korch::store<.*, W>\((o0 .*), x\d+\);", source)
    assert written(source) == ([f"{place} + {ahead}"] if ahead else [])


def test_what_goes_past_the_caches_is_not_fetched_to_be_written():
    g = Graph()
    assert not written(source_of(g.group(g.add("abs", [g.tensor("f32[99999]")]))))


def test_the_first_pass_at_the_same_points_fetches_what_is_written():
    """The one that computes exponentials has time; sums go through other loops."""
    group = softmax("f32[128,64,128]", 2)
    kept = source_of(group, "keep", 1 << 30)
    (place,) = re.findall(r"korch::store<float, W>\((o0 .*), x\d+\);", kept)
    assert written(kept) == [place]
    at = kept.index("fetch_to_write")
    assert kept.index("op_exp") < at < kept.index("combine_sum") < kept.index("store<float, W>(o0")
    again = source_of(group, "", 1 << 30)
    assert written(again) == [f"{place} + 256"]


def test_squares_fetch_the_lines_behind_each_row_to_be_written():
    """And those that are read next; small values stay as they are."""
    for text, is_fetched, is_long in (
        ("f32[400,400]", True, True),
        ("f32[180,180]", False, True),
        ("f32[16,9999]", True, True),
        ("f32[9999,16]", True, False),
    ):
        g = Graph()
        source = source_of(g.group(g.transpose(g.tensor(text), 1, 0)), "", 1 << 30)
        places = re.findall(r"korch::store<float, W>\((o0 .*), x\d+\);", source)
        assert places
        assert written(source) == [f"{place} + 16" for place in places if is_fetched], text
        assert ("fetch_across<W>(" in source) == (is_fetched and is_long), text
