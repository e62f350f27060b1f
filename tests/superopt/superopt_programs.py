"""Small tile programs and the graphs that they compute, for tests of the verifier."""

from collections.abc import Iterator

from korch.candidate.candidate import make_group
from korch.primitive.graph import PrimitiveGraph
from korch.tile.ir.bind import bind
from korch.tile.ir.program import TileProgram
from korch.tile.ir.text import format_program
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.support.blocks import Block, lora, normalized_update
from tests.support.parse_tiles import parse_program
from tests.tile.test_programs import ATTENTION as FOR_ALL_SIZES

ATTENTION = format_program(bind(parse_program(FOR_ALL_SIZES), {"rows": 7, "keys": 9}))
"""Attention with a carried maximum, by which sums are rescaled."""

LORA = """\
buffer x: input f32[32]
buffer w: input f32[64]
buffer a: input f32[16]
buffer b: input f32[16]
buffer y: output f32[32]
buffer t: tile f32[8]
buffer u: tile f32[32]
stage g<1
  pass i<4 r<2
    x0 = f32 0.0
    store t[2*i + r] = x0
  contract i<4 r<2 | p<8 by f32
    t[2*i + r] += x[8*i + p] * a[2*p + r]
  pass i<4 j<8
    x0 = f32 0.0
    store u[8*i + j] = x0
  contract i<4 j<8 | p<8 by f32
    u[8*i + j] += x[8*i + p] * w[8*p + j]
  contract i<4 j<8 | r<2 by f32
    u[8*i + j] += t[2*i + r] * b[8*r + j]
  pass i<4 j<8
    x0 = f32 load u[8*i + j]
    store y[8*i + j] = x0
"""
"""Two products into one accumulator."""


def plain_attention() -> PrimitiveGraph:
    b = Block()
    q, k, v = b.tensor("q", 7, 3), b.tensor("k", 9, 3), b.tensor("v", 9, 5)
    return b.result(b.add("matmul", (b.softmax(b.add("matmul", (q, b.turned(k)))), v)))


def softmax() -> PrimitiveGraph:
    b = Block()
    return b.result(b.softmax(b.tensor("x", 3, 5)))


def activations() -> PrimitiveGraph:
    b = Block()
    x = b.tensor("x", 3, 5)
    gate = b.add("mul", (x, b.add("sigmoid", (x,))))
    return b.result(b.add("max", (b.add("tanh", (gate,)), b.add("abs", (x,)))))


def lowered(graph: PrimitiveGraph) -> tuple[PrimitiveGraph, TileProgram]:
    group = make_group(graph, range(len(graph.primitives)), [v for _, v in graph.outputs])
    return group.body, lower(group.body, *group.plain_layouts, Machine(8, 2))


def programs() -> Iterator[tuple[PrimitiveGraph, TileProgram]]:
    yield plain_attention(), parse_program(ATTENTION)
    yield lora(), parse_program(LORA)
    for graph in (softmax(), activations(), normalized_update()):
        yield lowered(graph)
