"""Small tile programs and the graphs that they compute, for tests of the verifier."""

from collections.abc import Iterator

from korch.candidate.candidate import make_group
from korch.primitive.graph import PrimitiveGraph
from korch.tile.ir.parse import parse_program
from korch.tile.ir.program import TileProgram
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.support.blocks import Block, lora, normalized_update

ATTENTION = """\
buffer q: input f32[21]
buffer w: input f32[27]
buffer v: input f32[45]
buffer o: output f32[35]
buffer s: tile f32[28]
buffer top: tile f32[7]
buffer new: tile f32[7]
buffer most: tile f32[7]
buffer factor: tile f32[7]
buffer part: tile f32[7]
buffer total: tile f32[7]
buffer y: tile f32[35]
stage g<1
  pass i<7
    x0 = f32 -inf
    x1 = f32 0.0
    store top[i] = x0
    store total[i] = x1
  pass i<7 c<5
    x0 = f32 0.0
    store y[5*i + c] = x0
  loop j<3 carries top, total, y
    pass i<7 r<4
      x0 = f32 0.0
      store s[4*i + r] = x0
    contract i<7 r<min(4, 9 - 4*j) | d<3 by f32
      s[4*i + r] += q[3*i + d] * w[12*j + 3*r + d]
    pass i<7 | r<min(4, 9 - 4*j)
      x0 = f32 load s[4*i + r]
      max most[i] = x0
    pass i<7
      x0 = f32 load top[i]
      x1 = f32 load most[i]
      x2 = f32 max(x0, x1)
      x3 = f32 sub(x0, x2)
      x4 = f32 exp(x3)
      store new[i] = x2
      store factor[i] = x4
    pass i<7 r<min(4, 9 - 4*j)
      x0 = f32 load s[4*i + r]
      x1 = f32 load new[i]
      x2 = f32 sub(x0, x1)
      x3 = f32 exp(x2)
      store s[4*i + r] = x3
    pass i<7 | r<min(4, 9 - 4*j)
      x0 = f32 load s[4*i + r]
      sum part[i] = x0
    pass i<7
      x0 = f32 load total[i]
      x1 = f32 load factor[i]
      x2 = f32 mul(x0, x1)
      x3 = f32 load part[i]
      x4 = f32 add(x2, x3)
      x5 = f32 load new[i]
      store total[i] = x4
      store top[i] = x5
    contract i<7 c<5 | r<min(4, 9 - 4*j) by f32
      y[5*i + c] += s[4*i + r] * v[20*j + 5*r + c] rescale factor[i]
  pass i<7 c<5
    x0 = f32 load y[5*i + c]
    x1 = f32 load total[i]
    x2 = f32 div(x0, x1)
    store o[5*i + c] = x2
"""
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
