"""A plan -> one that stores a table of embeddings once if it is also the weight of a product.

The product reads the table transposed, in panels. Then `Gather` takes rows from the panels: its elements are further
apart, but it reads few rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from korch.candidate.candidate import Candidate
from korch.measure.record import Measured
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.tied import gathered_tables
from korch.provider.elements import in_layout
from korch.provider.generated import GeneratedProvider
from korch.provider.opaque import operator_of
from korch.runtime.transposed import transposed_port
from korch.search.ledger import Ledger
from korch.system.deadline import Deadline

MOST_LOSS = 0.01
"""The largest part of a plan's time that this may take."""


def with_tied_tables(
    graph: PrimitiveGraph, steps: Sequence[Candidate], ledger: Ledger, deadline: Deadline
) -> tuple[Candidate, ...]:
    """Return a plan's kernels, with those that take rows from tables that products have in another layout."""
    found = list(steps)
    for i, step in enumerate(steps):
        own = next(_changed(graph, step, steps), None)
        if own is None:
            continue
        lost_ns = 0
        if ledger.is_measured(step):
            (record,) = ledger.measure([own], deadline)
            if not isinstance(record, Measured):  # it failed, or there was no time
                continue
            lost_ns = record.time_ns - ledger.cost_ns(step)[0]
        if lost_ns <= MOST_LOSS * sum(ledger.cost_ns(c)[0] for c in steps):
            found[i] = own
    return tuple(found)


def _changed(graph: PrimitiveGraph, step: Candidate, steps: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the kernels for a `Gather` of a table that another kernel reads transposed."""
    group = step.group
    if operator_of(group.body.primitives) != "Gather":
        return
    place = group.position.get(group.body.primitives[0].inputs[0])
    table = group.inputs[place] if place is not None else None  # a uniform table is a part of the kernel
    if table is None or table not in gathered_tables(graph):
        return
    for other in steps:
        for value, layout in zip(other.group.inputs, other.offer.inputs, strict=True):
            port = transposed_port(graph, (value, layout), table) if value in graph.constants else None
            offer = in_layout(group, port[1]) if port is not None else None
            if offer is not None:
                yield replace(step, provider=GeneratedProvider.name, version=GeneratedProvider.version, offer=offer)
