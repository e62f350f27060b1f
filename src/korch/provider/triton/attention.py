"""Attention as one Triton kernel: softmax(f(q k)) v with an online softmax (Dao et al., 2022).

A program has a tile of queries. It goes over the keys in blocks, keeps the largest score so far and
rescales what it has summed when a larger one comes, so that the scores are never in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import around
from korch.cuda.kernel import CudaKernel
from korch.cuda.target import CudaTarget
from korch.primitive.types import DType
from korch.provider.attention.groups import attention_groups
from korch.provider.attention.match import match_group
from korch.provider.content import content_version
from korch.provider.triton.printer import KernelPrinter
from korch.schedule.contraction import Axes, Contraction, NotFusedError, extent
from korch.schedule.heads import Attention
from korch.tile.emit import Index
from korch.tile.index import ZERO, Expr, var
from korch.tile.triton_text import COLUMNS, ROWS, STORED, Text, power_of_two

WIDEST_HEAD = 256
"""Most terms of the first product, and columns of the second."""

FEWEST = 8
"""Fewest queries and keys."""

BLOCKS = ((128, 64, 8), (64, 64, 4), (32, 32, 4), (16, 32, 2), (16, 16, 1))
"""Queries, keys and warps of a program."""


class TritonAttentionProvider:
    """Makes kernels for groups of two products with a softmax between them."""

    name = "triton-attention"
    version = content_version("provider/triton", "provider/attention", "cuda")
    group_shapes = (around("matmul"), attention_groups)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer blocks of queries and keys that fit into shared memory, in the plain layout."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        types = group.body.types
        m, n = types[found.first.output].shape[-2:]
        terms, columns = types[found.first.inputs[0]].shape[-1], types[found.second.output].shape[-1]
        if max(terms, columns) > WIDEST_HEAD:
            return Refusal("the heads are too wide")
        if min(m, n) < FEWEST or min(t.size for t in types) == 0:
            return Refusal("there are too few queries or keys")
        offer = Offer(*group.plain_layouts)
        try:
            _Printer(group, offer, found, target).check()
        except NotFusedError as error:
            return Refusal(str(error))
        wide = _width(terms) + _width(columns)
        size = types[found.first.output].dtype.size_bytes
        return [
            Offer(offer.inputs, offer.outputs, f"{queries}x{keys}w{warps}")
            for queries, keys, warps in BLOCKS
            if queries < 2 * max(16, m)
            and keys < 2 * max(16, n)
            and (queries + 2 * keys) * wide * size <= target.shared_bytes
        ] or Refusal("no block fits into shared memory")

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Print the kernel."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        sizes, _, warps = offer.variant.partition("w")
        queries, keys = map(int, sizes.split("x"))
        try:
            return _Printer(group, offer, found, target).print(queries, keys, int(warps))
        except NotFusedError as error:
            return Refusal(str(error))


def _width(n: int) -> int:
    return max(16, power_of_two(n))


class _Printer(KernelPrinter):
    def __init__(self, group: Group, offer: Offer, found: Attention, target: CudaTarget) -> None:
        super().__init__(group, offer, target, found.first, found.second)
        self.match = found
        self.q, self.k, self.v = found.operands
        types = self.body.types
        *batch, m, n = types[found.first.output].shape
        terms, columns = types[found.first.inputs[0]].shape[-1], types[found.second.output].shape[-1]
        names = [(f"b{i}", size) for i, size in enumerate(batch)]
        index = tuple(ZERO if size == 1 else var(name) for name, size in names)

        def variable(name: str, size: int) -> tuple[Expr, Axes]:
            return (ZERO if size == 1 else var(name)), (((name, size),) if size != 1 else ())

        (row, rows), (key, keys) = variable("m", m), variable("n", n)
        (term, term_axes), (column, column_axes) = variable("d", terms), variable("e", columns)
        axes = tuple(axis for axis in names if axis[1] != 1)

        def side(value: int, *rest: Expr) -> Index:
            shape = types[value].shape[:-2]
            return (*(ZERO if n == 1 else e for n, e in zip(shape, index, strict=True)), *rest)

        self.scores = Contraction(
            axes, rows, keys, term_axes, side(self.q, row, term), side(self.k, term, key), (*index, row, key)
        )
        self.mixed = Contraction(axes, rows, column_axes, keys, (), side(self.v, key, column), (*index, row, column))
        self.dtype = types[found.first.output].dtype

    def check(self) -> None:
        """Raise NotFusedError if something around the products does not fit."""
        emitter = self.fusion.emitter(self.scores.ranges)
        self.fusion.argument(emitter, self.q, self.scores.a)
        self.fusion.argument(emitter, self.k, self.scores.b)
        emitter.give(self.match.first.output, self.scores.out, "score")
        emitter.value(self.match.weighed, self.scores.out)
        emitter = self.fusion.emitter(self.mixed.ranges)
        self.fusion.argument(emitter, self.v, self.mixed.b)
        self.fusion.outputs(emitter, self.match.second, self.mixed.out, "mixed")

    def print(self, queries: int, keys: int, warps: int) -> CudaKernel:
        """Print the kernel."""
        text, scores, mixed = Text(), self.scores, self.mixed
        batch, m, n = extent(scores.batch), extent(scores.rows), extent(scores.columns)
        terms, columns = extent(scores.terms), extent(mixed.columns)
        wide, broad = _width(terms), _width(columns)
        down = -(-m // queries)
        text.line("pid = tl.program_id(0)")
        beside = text.split(f"(pid // {down})", list(scores.batch), frozenset())
        text.line(f"m = (pid % {down}) * {queries} + tl.arange(0, {queries})[:, None]")
        text.line(f"da = tl.arange(0, {wide})[None, :]")
        text.line(f"db = tl.arange(0, {wide})[:, None]")
        text.line(f"e = tl.arange(0, {broad})[None, :]")
        rows = beside | text.split("m", list(scores.rows), ROWS)
        of_terms = dict(text.split("da", list(scores.terms), COLUMNS))
        down_terms = dict(text.split("db", list(scores.terms), ROWS))
        inside_m = {0: f"(m < {m})"} if m % queries else {}
        q_masks = inside_m | ({1: f"(da < {terms})"} if terms != wide else {})
        self.load(text, "q", self.q, scores.a, scores.ranges, rows | of_terms, q_masks, f"[{queries}, {wide}]")
        text.line(f'top = tl.full([{queries}, 1], float("-inf"), tl.float32)')
        text.line(f"total = tl.zeros([{queries}, 1], tl.float32)")
        text.line(f"acc = tl.zeros([{queries}, {broad}], tl.float32)")
        text.line(f"for n0 in range(0, {n}, {keys}):")
        text.depth += 1
        text.line(f"n = n0 + tl.arange(0, {keys})[None, :]")
        text.line(f"nv = n0 + tl.arange(0, {keys})[:, None]")
        short = n % keys != 0
        k_masks = ({1: f"(n < {n})"} if short else {}) | ({0: f"(db < {terms})"} if terms != wide else {})
        across = dict(text.split("n", list(scores.columns), COLUMNS))
        self.load(
            text, "k", self.k, scores.b, scores.ranges, beside | down_terms | across, k_masks, f"[{wide}, {keys}]"
        )
        text.line(f'score = tl.dot(q, k, input_precision="{self.precision}")')
        emitter = self.fusion.emitter(scores.ranges)
        emitter.give(self.match.first.output, scores.out, "score")
        name = emitter.value(self.match.weighed, scores.out)
        values, types = {"score": "score"}, {"score": self.dtype}
        n_mask = {1: f"(n < {n})"} if short else {}
        text.ops(emitter.ops, rows | across, inside_m | n_mask, values, types)
        weighed = f"tl.broadcast_to({values[name]}, [{queries}, {keys}])"
        text.line(f'x = tl.where(n < {n}, {weighed}, float("-inf"))' if short else f"x = {weighed}")
        self._weigh(text)
        v_masks = ({0: f"(nv < {n})"} if short else {}) | ({1: f"(e < {columns})"} if columns != broad else {})
        v_rows = dict(text.split("nv", list(mixed.terms), ROWS))
        v_columns = dict(text.split("e", list(mixed.columns), COLUMNS))
        self.load(text, "v", self.v, mixed.b, mixed.ranges, beside | v_rows | v_columns, v_masks, f"[{keys}, {broad}]")
        text.line(f'acc = tl.dot(weight.to({STORED[self.dtype]}), v, acc * scale, input_precision="{self.precision}")')
        text.line("top = above")
        text.depth -= 1
        total = "tl.where(total > 0.0, total, 1.0)" if self.match.is_guarded else "total"
        text.line(f"mixed = acc / {total}")
        out_masks = inside_m | ({1: f"(e < {columns})"} if columns != broad else {})
        at = rows | dict(text.split("e", list(mixed.columns), COLUMNS))
        emitter = self.fusion.emitter(mixed.ranges)
        stores = self.fusion.outputs(emitter, self.match.second, mixed.out, "mixed")
        self.write(text, emitter.ops, stores, {"mixed": ("mixed", DType.F32)}, at, out_masks, f"[{queries}, {broad}]")
        self.finish(text, batch * down, warps, 2)
        return self.kernel()

    def _weigh(self, text: Text) -> None:
        """Print the weights of a block of keys, and what scales the sums so far."""
        text.line("above = tl.maximum(top, tl.max(x, 1)[:, None])")
        # Where all of a row is minus infinity so far, subtract 0: the weights become 0.
        text.line('base = tl.where(above == float("-inf"), 0.0, above)')
        text.line("weight = tl.exp(x - base)")
        text.line("scale = tl.exp(top - base)")
        text.line("total = total * scale + tl.sum(weight, 1)[:, None]")
        if self.match.is_guarded:  # weights that are not numbers, a whole row's, become 0
            text.line("weight = tl.where(total != total, 0.0, weight)")
            text.line("scale = tl.where(total != total, 0.0, scale)")
