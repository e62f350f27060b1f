"""The places where reductions of a masked model may end, derived forwards from the masks."""

import math
from dataclasses import replace

from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import ConcatAttributes, ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import ValueType
from korch.ranges.filled import ends
from korch.ranges.form import Factor, extent
from korch.ranges.mask import Masks, plain
from korch.ranges.plan import RangePlan
from tests.ranges.range_models import bert, conv_net, masked_model

N = extent(0)


def test_attention_and_means_end_with_the_length() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 33),)})
    graph = whole.graph
    found = ends(graph, whole.plan)
    by_op: dict[str, list[dict]] = {}
    for number, own in found.items():
        by_op.setdefault(graph.primitives[number].op, []).append(own)
    assert by_op == {"reduce_max": [{3: N}], "reduce_sum": [{3: N}, {1: N}, {1: N}], "matmul": [{3: N}]}


def test_a_mean_over_an_image_ends_along_both_axes() -> None:
    whole = masked_model(conv_net(), {"height": (range(5, 34),), "width": (range(9, 32),)})
    found = ends(whole.graph, whole.plan)
    assert list(found.values()) == [{2: N.then(3, 4), 3: replace(N, dimension=1).then(3, 4)}]


class Small:
    """A graph of a masked value of 12 rows, 3 of them in each of 4 groups."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        masks = Masks(self.builder)
        self.x = self.builder.input("x", ValueType.parse("f32[12,5]"))
        self.other = self.builder.input("other", ValueType.parse("f32[12,5]"))
        self.factors, fixed = ((Factor(12, N),), (Factor(5),)), ((Factor(12),), (Factor(5),))
        self.zeros = masks.filled(plain(self.x, self.factors), (0,), 0.0).id
        self.least = masks.filled(plain(self.x, self.factors), (0,), -math.inf).id
        self.hidden, self.forms = masks.records(), (self.factors, fixed)

    def add(self, op: str, *inputs: int, attributes: object = None) -> int:
        return self.builder.add(op, list(inputs), *([attributes] if attributes is not None else []))

    def ends(self, *values: int) -> list[dict]:
        """Return where the reductions end that give some values."""
        for value in values:
            self.builder.output(f"o{value}", value)
        graph = self.builder.freeze()
        plan = RangePlan((12,), self.forms, (), self.hidden)
        found = ends(graph, plan)
        makers = {p.output: number for number, p in enumerate(graph.primitives)}
        return [found.get(makers[value], {}) for _, value in graph.outputs]


def test_numbers_behind_the_count_go_through_operations() -> None:
    g = Small()
    rows = ReduceAttributes((0,))
    powers = g.add("exp", g.least)
    turned = g.add("transpose", g.add("mul", powers, g.other), attributes=TransposeAttributes((1, 0)))
    split = g.add("reshape", turned, attributes=ReshapeAttributes((5, 12, 1)))
    joined = g.add("concat", split, split, attributes=ConcatAttributes(0))
    lower = g.add(
        "sub",
        g.least,
        g.add("broadcast", g.add("reduce_max", g.least, attributes=rows), attributes=BroadcastAttributes((12, 5))),
    )
    found = g.ends(
        g.add("reduce_sum", powers, attributes=rows),
        g.add("reduce_sum", joined, attributes=ReduceAttributes((1,))),
        g.add("reduce_sum", g.add("exp", lower), attributes=rows),
        g.add("reduce_sum", g.add("div", g.zeros, g.other), attributes=rows),
        g.add("reduce_sum", g.x, attributes=rows),  # inputs are padded with zeros
        g.add("matmul", turned, g.other),
        g.add("matmul", g.add("transpose", g.other, attributes=TransposeAttributes((1, 0))), g.zeros),
    )
    assert found == [{0: N}, {1: N}, {0: N}, {0: N}, {0: N}, {1: N}, {1: N}]


def test_other_numbers_do_not_end_a_reduction() -> None:
    g = Small()
    rows, columns = ReduceAttributes((0,)), ReduceAttributes((1,))
    split = g.add("reshape", g.zeros, attributes=ReshapeAttributes((4, 15)))
    found = g.ends(
        g.add("reduce_sum", g.other, attributes=rows),
        g.add("reduce_sum", g.add("exp", g.zeros), attributes=rows),  # ones
        g.add("reduce_max", g.zeros, attributes=rows),
        g.add("reduce_sum", g.least, attributes=rows),
        g.add("reduce_sum", g.zeros, attributes=columns),
        g.add("reduce_sum", g.add("div", g.other, g.zeros), attributes=rows),
        g.add("reduce_sum", g.add("add", g.other, g.zeros), attributes=rows),
        g.add("reduce_sum", split, attributes=rows),
    )
    assert found == [{}, {}, {}, {}, {}, {}, {}, {0: N.then(2, 3)}]
