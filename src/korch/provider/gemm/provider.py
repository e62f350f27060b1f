"""The provider of generated matrix products.

Constant matrices on the right are packed at build time; others are read where they lie.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.provider.gemm.match import Finish, Match, match_group, operand_place, print_finish
from korch.provider.gemm.place import Place
from korch.provider.provider import Kernel
from korch.target import Target

SCHEMA = 1
"""Raise it whenever the kernels change in speed or meaning."""

MOST_ELEMENTS = 1 << 22
"""Larger results are left to others: their addresses are looked at one by one."""

MOST_WASTE = 1.06
"""Rows computed per row needed, beyond which fewer rows are computed together."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """Sizes of blocks: vectors and rows in registers, rows of a block, parts of the columns."""

    vectors: int
    rows: int
    block: int
    parts: int

    @staticmethod
    def of(batch: int, m: int, n: int, target: Target) -> Blocking:
        """Choose the sizes for a product of `batch` times m rows and n columns."""
        vectors = 2 if n > target.lanes else 1
        most = (28 if target.isa in ("avx512", "neon") else 12) // vectors
        teams = max(1, target.threads // math.gcd(batch, target.threads))
        blocks = teams if m >= teams * most // 2 else 1
        per_block = -(-m // blocks)
        rows = _rows(per_block, most)
        largest = rows * max(1, 64 // rows)
        block = min(per_block, largest) if blocks == 1 else -(-per_block // rows) * rows
        while block > 2 * largest and block % (2 * rows) == 0:
            block //= 2
        strips = -(-n // (vectors * target.lanes))
        parts = 1 if batch * -(-m // block) >= target.threads else min(target.threads, strips)
        if block < m:
            block = -(-block // rows) * rows
        return Blocking(vectors, rows, block, parts)


def _rows(m: int, most: int) -> int:
    """Return how many rows to compute together: many, but few beyond m."""
    if m <= most:
        return m
    for rows in range(most, most // 2, -1):
        if -(-m // rows) * rows <= MOST_WASTE * m:
            return rows
    return most


class GemmProvider:
    """Makes kernels for groups around one `matmul` primitive."""

    name = "gemm"
    version = str(SCHEMA)

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the product in the plain layout."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        if target.lanes < 4:
            return Refusal("the target has no vectors")
        type_ = group.body.types[found.primitive.output]
        if not 0 < type_.size <= MOST_ELEMENTS or 0 in group.input_types[found.a.position].shape:
            return Refusal("the result is empty or too large")
        layouts = [Layout.plain(t.rank) for t in group.input_types]
        if _is_packed(group, found):
            rank = group.input_types[found.b.position].rank
            columns = _blocking(group, found, target).vectors * target.lanes
            order = (*range(rank - 2), rank - 1, rank - 2)
            layouts[found.b.position] = Layout(order, ((rank - 1, columns),))
        outputs = tuple(Layout.plain(t.rank) for t in group.output_types)
        return (Offer(tuple(layouts), outputs),)

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        finish = print_finish(group, found)
        if isinstance(finish, Refusal):
            return finish
        a, b = (operand_place(group, found, side) for side in (found.a, found.b))
        if isinstance(a, Refusal):
            return a
        if isinstance(b, Refusal):
            return b
        blocking = _blocking(group, found, target)
        columns = blocking.vectors * target.lanes
        n = group.body.types[found.primitive.output].shape[-1]
        is_packed = _is_packed(group, found)
        if a.step not in (0, 1) or a.row_step is None or (a.step == 0 and len(a.offsets[2]) > 1):
            return Refusal("the terms of the left operand are no neighbours")
        is_direct = not is_packed and b.step == 1 and bool(b.row_step) and n % columns == 0
        must_pack = not is_packed and not is_direct
        steps = (b.row_step, b.step)
        if must_pack and (None in steps or not (b.step == 1 or (b.step and b.row_step in (0, 1)))):
            return Refusal("the right operand lies neither by columns nor by terms")
        numbers = _constants(group, found, blocking, target) | {
            "A_STEP": a.row_step, "B_STEP": b.row_step or 0 if is_direct else 0,
            "B_ROW": b.row_step or 0 if must_pack else 0,
            "B_COLUMN": b.step or 0 if must_pack else 0,
        }  # fmt: skip
        layouts = " ".join(map(str, (*offer.inputs, "->", *offer.outputs)))
        comment = f"{group.text}layouts {layouts}"
        workspace = len(group.inputs) + len(group.outputs)
        text = _print(found, numbers, (a, None if is_packed else b), finish, comment, workspace)
        symbol = "k_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        floats = target.threads * numbers["DEPTH"] * columns if must_pack else 0
        return Kernel(symbol, text.replace("NAME", symbol), workspace_bytes=4 * floats)


def _is_packed(group: Group, found: Match) -> bool:
    """Whether the right operand is constant and one for all batches, as it came."""
    shape = group.input_types[found.b.position].shape
    is_constant = found.b.position in group.constant_inputs and not found.b.steps
    return is_constant and math.prod(shape[:-2]) == 1


def _sizes(group: Group, found: Match) -> tuple[int, int, int, int]:
    """Return batch, m, n and terms; batches that share the right operand are rows."""
    *batch, m, n = group.body.types[found.primitive.output].shape
    return math.prod(batch), m, n, group.body.types[found.primitive.inputs[0]].shape[-1]


def _blocking(group: Group, found: Match, target: Target) -> Blocking:
    batch, m, n, _ = _sizes(group, found)
    return Blocking.of(batch, m, n, target)


def _constants(group: Group, found: Match, blocking: Blocking, target: Target) -> dict[str, int]:
    batch, m, n, terms = _sizes(group, found)
    return {
        "BATCH": batch, "M": m, "N": n, "DEPTH": terms, "W": target.lanes,
        "NV": blocking.vectors, "ROWS": blocking.rows, "BLOCK": blocking.block,
        "PARTS": blocking.parts, "THREADS": target.threads,
    }  # fmt: skip


def _print(found: Match, numbers: dict[str, int], places: tuple[Place, Place | None],
           finish: Finish, comment: str, workspace: int) -> str:  # fmt: skip
    named = dict(finish.tables)
    starts = []
    for name, place in zip("ab", places, strict=True):
        text = "0" if place is None else place.text(0, "i")
        if text is None and place is not None:
            text, named[f"NAME_{name}"] = f"NAME_{name}[i]", place.offsets[0]
        starts.append(text or "0")
    head = "".join(f"// {line}\n" for line in comment.splitlines())
    sizes = "".join(f"  static constexpr long {name} = {n};\n" for name, n in numbers.items())
    tables = "".join(
        f"static const int64_t {name}[] = {{{', '.join(map(str, table))}}};\n"
        for name, table in named.items()
    )
    lines = "".join(f"    {line}\n" for line in finish.lines)
    return f"""{head}#include "korch_gemm.h"

{tables}
struct NAME_kernel {{
{sizes}  static long a(long i) {{ return {starts[0]}; }}
  static long b(long i) {{ return {starts[1]}; }}
  template <int W>
  static KORCH_INLINE void finish(void* const* buffers, korch::Vec<float, W> y, long i, long m,
                                  long n) {{
{lines}  }}
}};

extern "C" int NAME_run(void*, void* const* buffers) {{
  return korch_gemm::run<NAME_kernel>(
      buffers, static_cast<const float*>(buffers[{found.a.position}]),
      static_cast<const float*>(buffers[{found.b.position}]),
      static_cast<float*>(buffers[{workspace}]));
}}
"""
