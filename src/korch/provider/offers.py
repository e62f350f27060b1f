"""The layouts in which generated kernels are offered, on any target.

A group is offered with all values in one kind of layout (plain, channels-last, or blocked channels). A small
group with at most one variable input and one output is also offered with every pair of different input and
output layouts, so that a change of layout can be fused into the kernel.
"""

from collections.abc import Iterator

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout, layouts_by_kind
from korch.primitive.types import ValueType

MIXED_PRIMITIVES = 2
"""Groups of at most this many primitives are also offered with an output layout that differs from the input's."""


def offered_layouts(group: Group, lanes: int) -> Iterator[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
    """Yield the layouts of inputs and outputs in which a group is offered."""
    inputs, outputs = group.input_types, group.output_types
    variable = [t for i, t in enumerate(inputs) if i not in group.constant_inputs]
    computed = sum(p.op not in ("broadcast", "slice") for p in group.body.primitives)
    choices = {choice: None for t in (*inputs, *outputs) for choice in layouts_by_kind(t, lanes)}
    for source in choices:
        for sink in choices:
            is_mixed = source != sink
            # For larger groups, a separate kernel changes the layout.
            if is_mixed and (len(variable) > 1 or len(outputs) > 1 or computed > MIXED_PRIMITIVES):
                continue
            yield (
                tuple(
                    _layout(t, "plain" if i in group.constant_inputs else source, lanes) for i, t in enumerate(inputs)
                ),
                tuple(_layout(t, sink, lanes) for t in outputs),
            )


def _layout(type_: ValueType, kind: str, lanes: int) -> Layout:
    return layouts_by_kind(type_, lanes).get(kind, Layout.plain(type_.rank))
