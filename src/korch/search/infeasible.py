"""Explains why candidates form no plan: primitives that are in no candidate, and kernels that failed."""

from collections.abc import Mapping, Sequence

from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError, UnprovidedError
from korch.measure.record import Failed, Record
from korch.primitive.graph import PrimitiveGraph

MOST_NAMED = 4
"""The most primitives, refusals or kernels that a message names."""

MOST_LETTERS = 160
"""The most characters that are shown of a kernel's message."""


def check_every_primitive_runs(
    graph: PrimitiveGraph, candidates: Sequence[Candidate], refusals: Mapping[str, int]
) -> None:
    """Check that the candidates can compute the outputs, before a solver is run.

    Raises:
        UnprovidedError: an output needs a primitive that is in no candidate.
    """
    missing = missing_primitives(graph, candidates)
    if missing is None:
        return
    if not missing:
        raise UnprovidedError("no provider runs some primitives, and others need each other")
    others = f" Nor do they run {_named(graph, missing[1:])}." if missing[1:] else ""
    raise UnprovidedError(
        f"no provider runs {_operation(graph, missing[0])}",
        where=where_of(graph, missing[0]),
        hint=f"The providers say: {'; '.join(sorted(refusals)[:MOST_NAMED])}.{others}".removesuffix("."),
    )


def no_working_plan(
    graph: PrimitiveGraph, candidates: Sequence[Candidate], records: Mapping[str, Record], error: InfeasibleError
) -> InfeasibleError:
    """Return the error to raise when the candidates that did not fail form no plan.

    `records`: measurements and failures of candidates, by key.

    Returns:
        An error that names the primitives that are run by failed kernels only, and names those kernels.
    """
    failed = {c.key: (c, r) for c in candidates if isinstance(r := records.get(c.key), Failed)}
    missing = missing_primitives(graph, [c for c in candidates if c.key not in failed])
    if missing:
        lost = set(missing)
        named = {key: entry for key, entry in failed.items() if not lost.isdisjoint(entry[0].group.primitives)}
        error = InfeasibleError(f"every kernel that runs {_named(graph, missing)} failed", where_of(graph, missing[0]))
        failed = named or failed
    reasons = list(dict.fromkeys(f"{c.provider}, {r.kind}: {_short(r.message)}" for c, r in failed.values()))
    told = f"Kernels that failed: {'; '.join(reasons[:MOST_NAMED])}. " if reasons else ""
    before = f"{error.hint}. " if error.hint else ""
    hint = f"{before}{told}Run `korch doctor`; `korch --verbose optimize` shows the complete messages"
    return InfeasibleError(error.what, error.where, error.expected, hint)


def missing_primitives(graph: PrimitiveGraph, candidates: Sequence[Candidate]) -> list[int] | None:
    """Return one primitive for each value that no candidate computes; None if the outputs can be computed."""
    covered = {p for candidate in candidates for p in candidate.group.primitives}
    known, before = set(graph.given), -1
    while len(known) != before:
        before = len(known)
        known |= {graph.primitives[p].output for p in covered if known.issuperset(graph.primitives[p].inputs)}
    if known.issuperset(value for _, value in graph.outputs):
        return None
    return [producers[0] for producers in graph.producers if producers and covered.isdisjoint(producers)]


def _operation(graph: PrimitiveGraph, p: int) -> str:
    primitive = graph.primitives[p]
    return f"{primitive.op} of type {graph.types[primitive.output]}"


def _named(graph: PrimitiveGraph, primitives: Sequence[int]) -> str:
    """Return a text that names some primitives and the model nodes that they come from."""
    named = [f"{_operation(graph, p)} ({where_of(graph, p)})" for p in primitives[:MOST_NAMED]]
    more = f" and {len(primitives) - MOST_NAMED} more" if len(primitives) > MOST_NAMED else ""
    return ", ".join(named) + more


def where_of(graph: PrimitiveGraph, p: int) -> str:
    """Return the node that a primitive was made from, or else its value, for messages."""
    origin = graph.origins[p] if graph.origins else ""
    return f"node {origin}" if origin else f"value %{graph.primitives[p].output}"


def _short(message: str) -> str:
    """Return the first line of a message, shortened to MOST_LETTERS characters."""
    line = next(iter(message.strip().splitlines()), "no message")
    return line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS]}..."
