"""A channel map gives the same results wherever a rule moves it, and is moved to where it costs least."""

import numpy as np

from korch.equivalence.rules import channels
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes
from tests.equivalence.equivalence_oracle import Draft, apply_rules, assert_alternatives_agree

PLAIN = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1))


def scaled(draft: Draft, x: int, axis: int) -> int:
    """x times constants that do not vary along an axis, on either side, broadcast or stored."""
    shape, rng = draft.shape(x), draft.rng
    small = [1 if i == axis or rng.integers(2) else n for i, n in enumerate(shape)]
    factor = draft.add("broadcast", (draft.constant(*small),), BroadcastAttributes(shape))
    if rng.integers(2):
        factor = draft.builder.constant(np.broadcast_to(draft.array(*small), shape).copy())
    return draft.add("mul", (factor, x) if rng.integers(2) else (x, factor))


def shifted(draft: Draft, x: int, axis: int) -> int:
    shape, rng = draft.shape(x), draft.rng
    small = [n if i == axis or rng.integers(3) == 0 else 1 for i, n in enumerate(shape)]
    shift = draft.add("broadcast", (draft.constant(*small),), BroadcastAttributes(shape))
    return draft.add(str(rng.choice(["add", "sub"])), (x, shift))


def stretched(draft: Draft, x: int, axis: int) -> int:
    """Interpolate another axis to twice its size."""
    rng, rank = draft.rng, len(draft.shape(x))
    other = int(rng.choice([i for i in range(rank) if i != axis]))
    n = draft.shape(x)[other]
    terms = [
        scaled(draft, draft.add("take", (x,), TakeAttributes(other, indices)), axis)
        for indices in (tuple(i // 2 for i in range(2 * n)), tuple((i + 1) // 2 % n for i in range(2 * n)))
    ]
    return draft.add("add", tuple(terms))


def moved(draft: Draft, x: int, axis: int) -> tuple[int, int]:
    """One random step that treats all channels along `axis` equally; the channel axis after it."""
    rng, shape = draft.rng, draft.shape(x)
    others = [i for i in range(len(shape)) if i != axis]
    other = int(rng.choice(others))
    match int(rng.integers(0, 11)):
        case 0:
            return scaled(draft, x, axis), axis
        case 1:
            return shifted(draft, x, axis), axis
        case 2:
            return stretched(draft, x, axis), axis
        case 3:
            perm = tuple(int(i) for i in rng.permutation(len(shape)))
            return draft.add("transpose", (x,), TransposeAttributes(perm)), perm.index(axis)
        case 4:
            before = tuple(int(i == other) for i in range(len(shape)))
            mode = str(rng.choice(["constant", "edge"]))
            return draft.add("pad", (x,), PadAttributes(before, before, mode)), axis
        case 5:
            size = tuple(max(1, n - 1) if i == other else n for i, n in enumerate(shape))
            start = tuple(n - m for n, m in zip(shape, size, strict=True))
            return draft.add("slice", (x,), SliceAttributes(start, size, (1,) * len(shape))), axis
        case 6:
            return draft.add("neg", (x,)), axis
        case 7:
            part = draft.add("concat", (x, scaled(draft, x, axis)), ConcatAttributes(axis))
            return part, axis
        case 8:
            return draft.add("concat", (x, x), ConcatAttributes(other)), axis
        case 9:
            return draft.add("reduce_sum", (x,), ReduceAttributes((other,))), axis
        case _:
            wide = (*shape[:axis], 1, *shape[axis:]) if len(shape) < 5 else shape
            return draft.add("reshape", (x,), ReshapeAttributes(wide)), axis + len(wide) - len(shape)


def linear(draft: Draft, x: int, axis: int, channels: int) -> tuple[int, int]:
    """Map the channels; first bring their axis to where a primitive can."""
    shape = draft.shape(x)
    if axis < len(shape) - 2 and not (axis == 1 and len(shape) == 4):
        perm = (*(i for i in range(len(shape)) if i != axis), axis)
        x, axis = draft.add("transpose", (x,), TransposeAttributes(perm)), len(shape) - 1
        shape = draft.shape(x)
    ones = (1,) * (len(shape) - 2)
    if axis == len(shape) - 1:
        return draft.add("matmul", (x, draft.constant(*ones, shape[-1], channels))), axis
    if axis == len(shape) - 2 and len(shape) != 3:
        return draft.add("matmul", (draft.constant(*ones, channels, shape[-2]), x)), axis
    if len(shape) == 4:
        return draft.add("conv", (x, draft.constant(channels, shape[1], 1, 1)), PLAIN), axis
    return draft.add("matmul", (draft.constant(1, channels, shape[-2]), x)), axis


def test_random_chains_exactly() -> None:
    fired = 0
    for seed in range(250):
        draft = Draft(seed, integers=True)
        rng = draft.rng
        x, axis = draft.input(*(int(n) for n in rng.integers(1, 4, int(rng.integers(2, 5))))), 1
        if rng.integers(2):
            x, axis = linear(draft, x, axis, int(rng.integers(1, 5)))
        for _ in range(int(rng.integers(1, 5))):
            x, axis = moved(draft, x, axis)
        graph = draft.finish(linear(draft, x, axis, int(rng.integers(1, 4)))[0])
        result, report = apply_rules(graph, channels.RULES)
        fired += report.rules[0].fired
        assert_alternatives_agree(result, graph, seed=seed % 99, integers=True)
    assert fired >= 100


def decode_head(draft: Draft) -> int:
    """Images of one, a half and a quarter of the size: projected, upsampled, joined, fused."""
    x, parts = draft.input(1, 8, 8, 8), []
    for k in (1, 2, 4):
        n = 8 // k
        y = draft.add("slice", (x,), SliceAttributes((0,) * 4, (1, 8, n, n), (1,) * 4))
        y = draft.add("reshape", (y,), ReshapeAttributes((1, 8, n * n)))
        y = draft.add("transpose", (y,), TransposeAttributes((0, 2, 1)))
        y = draft.add("matmul", (y, draft.constant(1, 8, 6)))
        bias = draft.add("broadcast", (draft.constant(6),), BroadcastAttributes(draft.shape(y)))
        y = draft.add("transpose", (draft.add("add", (y, bias)),), TransposeAttributes((0, 2, 1)))
        y = draft.add("reshape", (y,), ReshapeAttributes((1, 6, n, n)))
        for axis in (2, 3):
            y = draft.add("take", (y,), TakeAttributes(axis, tuple(i // k for i in range(8))))
        parts.append(y)
    joined = draft.add("concat", tuple(parts), ConcatAttributes(1))
    return draft.add("conv", (joined, draft.constant(5, 18, 1, 1)), PLAIN)


def test_a_decode_head_needs_one_small_product_per_image() -> None:
    draft = Draft(1, integers=True)
    graph = draft.finish(decode_head(draft))
    result, _ = apply_rules(graph, channels.RULES)
    assert_alternatives_agree(result, graph, seed=1, integers=True)
    shapes = {result.types[p.output].shape for p in result.primitives if p.op == "matmul"}
    assert {(1, 64, 5), (1, 16, 5), (1, 4, 5)} <= shapes  # the two maps in one, before upsampling


def test_a_pool_of_sums_lets_the_map_through() -> None:
    draft = Draft(2, integers=True)
    x = draft.input(1, 3, 6, 6)
    pool = PoolAttributes((2, 2), (1, 1), (1, 0), (0, 1), (1, 1))
    y = draft.add("pool_sum", (x,), pool)
    y = draft.add("take", (y,), TakeAttributes(2, tuple(i // 3 for i in range(18))))
    graph = draft.finish(draft.add("conv", (y, draft.constant(2, 3, 1, 1)), PLAIN))
    result, report = apply_rules(graph, channels.RULES)
    assert report.rules[0].fired == 1
    assert_alternatives_agree(result, graph, seed=3, integers=True)


def test_what_something_else_reads_is_not_counted_as_saved() -> None:
    draft = Draft(4)
    x = draft.input(1, 8, 4, 4)
    inner = draft.add("conv", (x, draft.constant(8, 8, 3, 3)), PLAIN)
    outer = draft.add("conv", (inner, draft.constant(8, 8, 1, 1)), PLAIN)
    draft.builder.output("inner", inner)
    _, report = apply_rules(draft.finish(outer), channels.RULES)
    assert report.rules[0].fired == 0
    assert report.rules[0].refused == {"no place for the map is cheaper": 1}
