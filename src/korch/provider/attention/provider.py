"""The provider of generated attention. All tensors are plain; the scores are never in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import around
from korch.provider.attention.groups import attention_groups
from korch.provider.attention.match import Attention, match_group
from korch.provider.content import content_version
from korch.provider.epilogue import Epilogue
from korch.provider.gemm.match import Operand, epilogue_of, matrices_of, operand_of, print_finish, print_value
from korch.provider.provider import Kernel, Threading, named_kernel
from korch.provider.widen import widened
from korch.schedule.contraction import Fusion, NotFusedError, refuse_types
from korch.target import Target

FEWEST_QUERIES = 8
"""With fewer, keys and values are packed for too little."""

MANY_KEYS, KEYS = 1024, 512
"""More keys than the first number are looked at in blocks of the second."""

MOST_BYTES = 64 << 20
"""Largest workspace of a thread: keys and values, packed."""


@dataclass(frozen=True, eq=False)
class _Plan:
    """All that is printed: where the operands lie, f, what follows, and the constants."""

    operands: tuple[Operand, Operand, Operand]
    epilogue: Epilogue
    score: tuple[str, ...]
    finish: tuple[str, ...]
    numbers: dict[str, int]
    workspace_bytes: int


class AttentionProvider:
    """Makes kernels for groups of two products with a softmax between them."""

    name = "attention"
    version = content_version("provider/attention", "provider/gemm")
    group_shapes = (around("matmul", widens=True), attention_groups)

    def __init__(self) -> None:
        self._plans: dict[tuple[str, Target], _Plan | Refusal] = {}

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the group in the plain layout."""
        plan = self._plan(group, target)
        return plan if isinstance(plan, Refusal) else (Offer(*group.plain_layouts),)

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        plan = self._plan(group, target)
        if isinstance(plan, Refusal):
            return plan
        positions = [operand.position for operand in plan.operands]
        operands = widened(group, offer.inputs, positions, plan.workspace_bytes // 4, target)
        text = _print(plan, group.text, operands.texts, len(group.inputs) + len(group.outputs))
        return named_kernel(text, workspace_bytes=4 * operands.floats, threading=Threading.TEAM)

    def _plan(self, group: Group, target: Target) -> _Plan | Refusal:
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        key = (group.key, target)
        if key not in self._plans:
            try:
                self._plans[key] = _make_plan(group, found, target)
            except NotFusedError as error:
                self._plans[key] = Refusal(str(error))
        return self._plans[key]


def _make_plan(group: Group, found: Attention, target: Target) -> _Plan | Refusal:
    layouts, types = group.plain_layouts, group.body.types
    *batch_axes, m, n = types[found.first.output].shape
    terms, columns = types[found.first.inputs[0]].shape[-1], types[found.second.output].shape[-1]
    batch = math.prod(batch_axes)
    if target.lanes < 4:
        return Refusal("the target has no vector registers")
    if min(batch, n, terms, columns) == 0 or m < FEWEST_QUERIES:
        return Refusal("there are too few queries, or nothing at all")
    refusal = refuse_types(group.body, found.first, found.second, inside=found.inside)
    if refusal is not None:
        return refusal
    fusion = Fusion(group, layouts, found.first, found.second)
    scores, mixed = matrices_of(group.body, found.first), matrices_of(group.body, found.second)
    indices = ((scores.a, scores), (scores.b, scores), (mixed.b, mixed))
    q, k, v = (
        operand_of(fusion, value, index, matrices.ranges)
        for value, (index, matrices) in zip(found.operands, indices, strict=True)
    )
    if q.step != 1:
        return Refusal("the terms of the queries are not adjacent in memory")
    if not (_is_packable(k) and _is_packable(v)):
        return Refusal("keys or values lie neither by columns nor by terms")
    epilogue = epilogue_of(group, target.lanes)
    before = print_value(fusion, found.first, found.weighed, epilogue)
    after = print_finish(fusion, found.second, epilogue)
    numbers = _numbers(batch, m, n, terms, columns, target) | {
        "IS_GUARDED": int(found.is_guarded),
        "Q_STEP": q.row_step,
        "K_ROW": k.row_step,
        "K_COLUMN": k.step,
        "V_ROW": v.row_step,
        "V_COLUMN": v.step,
    }
    floats = _floats(numbers)
    if 4 * floats > MOST_BYTES:
        return Refusal("there are too many keys to pack")
    return _Plan((q, k, v), epilogue, before, after, numbers, 4 * target.threads * floats)


def _is_packable(operand: Operand) -> bool:
    """Whether the elements of a row or of a column of a right operand are neighbours."""
    return 1 in (operand.step, operand.row_step)


def _numbers(batch: int, m: int, n: int, terms: int, columns: int, target: Target) -> dict[str, int]:
    """Choose the sizes of blocks."""
    most = target.registers // 2 - 2
    chunks = 1
    while (batch * chunks) % target.threads and m // (chunks + 1) >= 2 * most:
        chunks += 1
    per_chunk = -(-m // chunks)
    rows = min(
        range(max(1, min(most, per_chunk) // 2), min(most, per_chunk) + 1),
        key=lambda r: (-(-per_chunk // r) * r * (1 + 1 / r), -r),
    )
    return {
        "BATCH": batch,
        "M": m,
        "N": n,
        "D": terms,
        "E": columns,
        "W": target.lanes,
        "ROWS": min(rows, m // chunks),
        "CHUNKS": chunks,
        "NE": 2 if columns > target.lanes else 1,
        "THREADS": target.threads,
        "KEYS": n if n <= MANY_KEYS else KEYS,
    }


def _floats(numbers: dict[str, int]) -> int:
    """Return the workspace of a thread: keys and values, packed, a block of scores, and results.

    The results are those of a block of queries before the last block of keys; see `FLOATS` in
    `native/korch_attention.h`.
    """

    def up(n: int, step: int) -> int:
        return -(-n // step) * step

    pair = 2 * numbers["W"]
    columns = up(numbers["E"], numbers["NE"] * numbers["W"])
    is_one_block = numbers["N"] <= numbers["KEYS"]
    block = up(min(numbers["N"], numbers["KEYS"]), pair) + (0 if is_one_block else columns)
    packed = up(numbers["N"], pair) * numbers["D"] + numbers["N"] * columns
    return packed + numbers["ROWS"] * block


def _print(plan: _Plan, comment: str, operands: Sequence[str], workspace: int) -> str:
    starts = [
        f"  static long {name}(long i) {{ return {plan.epilogue.expr(operand.start)}; }}\n"
        for name, operand in zip("qkv", plan.operands, strict=True)
    ]
    head = "".join(f"// {line}\n" for line in comment.splitlines())
    sizes = "".join(f"  static constexpr long {name} = {n};\n" for name, n in plan.numbers.items())
    score, finish = ("".join(f"    {line}\n" for line in part) for part in (plan.score, plan.finish))
    separator = ",\n      "
    arguments = (
        "[[maybe_unused]] void* const* buffers, korch::Vec<float, W> y, "
        "[[maybe_unused]] long i, [[maybe_unused]] long m, [[maybe_unused]] long n"
    )
    return f"""{head}#include "korch_attention.h"

{plan.epilogue.tables}
struct NAME_kernel {{
{sizes}{"".join(starts)}  template <int W>
  static KORCH_INLINE korch::Vec<float, W> score({arguments}) {{
{score}  }}
  template <int W>
  static KORCH_INLINE void finish({arguments}) {{
{finish}  }}
}};

extern "C" int NAME_run(void*, void* const* buffers) {{
  return korch_attention::run<NAME_kernel>(
      buffers, {separator.join(operands)},
      static_cast<float*>(buffers[{workspace}]));
}}
"""
