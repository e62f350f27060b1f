"""Primitives of a quantized model -> the same model, computed with bytes wherever the target has kernels for it.

A quantized model has a dequantization before each operator and a quantization after it. Here products of dequantized
bytes become exact 32-bit sums, and the operations after them become one multiplication. Primitives that only move or
compare elements are applied to the bytes instead. These forms read fewer bytes and are never slower, so they replace
the model's own primitives; as alternatives they would multiply the number of groups in the search.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from korch.candidate.candidate import Group, make_group
from korch.equivalence.rule import AnyRule, RuleRefusal, View, Write, rule_of
from korch.equivalence.rules import integers, quantization, stored
from korch.equivalence.rules.integers import ProductMatch
from korch.equivalence.rules.stored import BlockMatch
from korch.equivalence.saturate import SaturationLimits, first_known, saturate
from korch.primitive.graph import GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.lowering import MULTIPLIED, lower_products
from korch.primitive.types import NARROW, DType
from korch.primitive.verbs import rebuilt
from korch.primitive.walks import depth_first
from korch.segments.choose import choose
from korch.system.deadline import Deadline

HasKernel = Callable[[Group], bool]
"""Function that tells whether a target has a kernel for a group."""


def is_quantized(graph: PrimitiveGraph) -> bool:
    """Return whether a graph has quantized values."""
    return any(type_.dtype in NARROW for type_ in graph.types)


def in_bytes(
    graph: PrimitiveGraph, has_kernel: HasKernel | None, deadline: Deadline, multiplied: Sequence[DType] = MULTIPLIED
) -> PrimitiveGraph:
    """Return a graph with its products lowered, and computed with bytes where the model is quantized.

    `has_kernel`: whether the target has a kernel for a product of bytes; None to keep all products in floats.
    """
    if not is_quantized(graph):
        return lower_products(graph, multiplied)
    # This comes first, so that rules that move bytes have to handle only one type of bytes.
    graph = _replaced(graph, (quantization.SIGNED_BYTES_ARE_UNSIGNED_ONES_LESS_128,), True, deadline)
    graph = _replaced(graph, quantization.RULES, True, deadline)
    if has_kernel is None:
        return lower_products(graph, multiplied)
    product = replace(integers.PRODUCT_OF_DEQUANTIZED_IS_INTEGER, rewrite=partial(_integer_product, has_kernel))
    # A value that is also needed as floats is moved as floats, unless a product needs its bytes.
    moves = quantization.MOVE_COMES_BEFORE_DEQUANTIZATION
    rules = (product, moves, integers.BIAS_JOINS_INTEGER_SUMS, integers.SCALES_OF_SUMS_COMPOSE)
    graph = _replaced(graph, rules, False, deadline)
    once = replace(integers.STORED_WEIGHTS_ARE_COMPUTED_ONCE, roots=("conv",))
    by_columns = replace(stored.STORED_WEIGHTS_LIE_BY_COLUMNS, rewrite=partial(_stored_product, has_kernel))
    graph = _replaced(graph, (once,), False, deadline)
    # Plans that widen all weights in each run take many times as long, so the end of the budget does not stop this.
    graph = _replaced(graph, (by_columns,), False, deadline.without_limit)
    return lower_products(graph, multiplied, keeps=lambda primitive: has_kernel(_group_of(graph, primitive)))


def _replaced(graph: PrimitiveGraph, rules: Sequence[AnyRule], strict: bool, deadline: Deadline) -> PrimitiveGraph:
    """Return a graph in which the results of some rules replace the original primitives, as far as it can run."""
    limits = SaturationLimits.of(len(graph.primitives))
    found, report = saturate(graph, strict=strict, rules=rules, limits=limits, deadline=deadline)
    if not any(rule.fired for rule in report.rules):
        return graph
    written = {p.output for p, origin in zip(found.primitives, found.origins, strict=True) if rule_of(origin)}
    kept = [
        p
        for p, primitive in enumerate(found.primitives)
        if rule_of(found.origins[p]) or primitive.output not in written
    ]
    narrowed = found.with_primitives(kept)
    known = first_known(narrowed)
    can_run = all(value in known for _, value in narrowed.outputs)
    return _numbered_in_order(choose(narrowed if can_run else found))


def _numbered_in_order(graph: PrimitiveGraph) -> PrimitiveGraph:
    """Return a graph without alternatives whose values are numbered in an order in which they can be computed."""

    def operands(value: int) -> list[int]:
        return [v for primitive in graph.producing(value) for v in primitive.inputs]

    return rebuilt(graph, order=depth_first(range(len(graph.types)), operands))


def _integer_product(has_kernel: HasKernel, view: View, match: ProductMatch) -> Write | RuleRefusal:
    """Return what the rule writes, or why a product stays in floats: the rule's reason, or a missing kernel."""
    write = integers.PRODUCT_OF_DEQUANTIZED_IS_INTEGER.rewrite(view, match)
    if isinstance(write, RuleRefusal):
        return write
    builder = GraphBuilder()
    operands = []
    for side in (match.left, match.right):
        constant = view.constant(side.q)
        known = None if constant is None else builder.constant(constant.array)
        operands.append(builder.input(f"x{side.q}", view.type(side.q)) if known is None else known)
    builder.output("y", builder.add(match.root.op, operands, match.root.attributes))
    graph = builder.freeze()
    is_taken = len(graph.linear) == 1 and has_kernel(_group_of(graph, graph.linear[0]))
    return write if is_taken else RuleRefusal("no kernel multiplies these bytes", match.root.output)


def _stored_product(has_kernel: HasKernel, view: View, match: BlockMatch) -> Write | RuleRefusal:
    """Return what the rule writes, or why weights stay as stored: the rule's reason, or a missing kernel."""
    found = stored.block_product(view, match)
    if isinstance(found, RuleRefusal):
        return found
    builder = GraphBuilder()
    arrays = (found.packed, found.scales.astype(np.float32), found.zeros)
    inputs = [builder.input("x", view.type(match.root.inputs[0]))]
    inputs += [builder.constant(array) for array in arrays if array is not None]
    builder.output("y", builder.add("matmul_stored", inputs, found.attributes))
    graph = builder.freeze()
    is_taken = has_kernel(_group_of(graph, graph.primitives[0]))
    return found.write if is_taken else RuleRefusal("no kernel multiplies by such weights", match.root.output)


def _group_of(graph: PrimitiveGraph, primitive: Primitive) -> Group:
    return make_group(graph, (graph.primitives.index(primitive),), (primitive.output,))
