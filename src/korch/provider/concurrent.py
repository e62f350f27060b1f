"""Runs several kernels concurrently, each on a subset of the threads.

A small kernel on all threads loses time to starting them, to uneven shares of work, and to shares smaller
than its blocks. On fewer threads it loses less, and other kernels use the remaining threads. One parallel
region has *lanes* of one or more threads. A lane runs one kernel, called a part, or several parts one after
another. A single lane of one thread makes a kernel that starts no threads.

A part in a lane of several threads opens no parallel region: OpenMP creates the threads of a nested region
each time, which takes longer than such kernels run. Each of the lane's threads calls the part instead
(`korch_team.h`). Parts that use a library or have a state may have threads of their own, so their lanes have one.

The parts are other providers' kernels, built for the lane's number of threads; the offer's `lanes` lists them.
The offer's variant is the text of the lanes: lanes are separated by `|`, parts by `+`. Such candidates are not
offered for groups, because every pair of groups would give another one; they are made from the kernels of a plan
(see `korch.concurrent.side_by_side`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from korch.alignment import align_up
from korch.candidate.candidate import Candidate, Group, Offer, Refusal
from korch.candidate.lane import Lane, LanePart
from korch.candidate.layout import Layout
from korch.candidate.unite import split, unite
from korch.primitive.graph import PrimitiveGraph
from korch.provider.content import content_version
from korch.provider.faults import Faults
from korch.provider.parts import MOST_BUFFERS, Parts
from korch.provider.provider import Kernel, Provider, Threading, named_kernel
from korch.provider.teams import team_refusal
from korch.provider.tile_kernel import comment_of
from korch.target import Target

Lanes = tuple[Lane, ...]


class ConcurrentProvider:
    """Runs kernels of other providers concurrently, each on a subset of the threads.

    Args:
        providers: the other providers.
        faults: gets the errors that they raise.
    """

    name = "concurrent"
    version = content_version("provider/gemm", "provider/conv", "provider/winograd", "provider/attention")
    group_shapes = ()

    def __init__(self, providers: Sequence[Provider[Target, Kernel]], faults: Faults | None = None) -> None:
        self._faults = faults or Faults()
        self._providers: Mapping[str, Provider[Target, Kernel]] = {p.name: p for p in providers}
        self._offers: dict[tuple[str, str, Target], Sequence[Offer] | Refusal] = {}

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Refuse every group: concurrent kernels are made from the kernels of a plan."""
        return Refusal("concurrent kernels are made from the kernels of a plan")

    def propose(
        self, graph: PrimitiveGraph, lanes: Sequence[Sequence[Candidate]], target: Target, threads: Sequence[int] = ()
    ) -> Candidate | Refusal:
        """Return the candidate that runs some kernels concurrently.

        Args:
            graph: the graph that the kernels belong to.
            lanes: the kernels that each lane runs. No kernel may depend on another.
            target: the machine.
            threads: the number of threads of each lane (default: one each).
        """
        threads = threads or [1] * len(lanes)
        if sum(threads) > target.threads:
            return Refusal(f"there are only {target.threads} threads")
        chosen = [candidate for lane in lanes for candidate in lane]
        counts = [count for count, lane in zip(threads, lanes, strict=True) for _ in lane]
        group = unite(graph, [c.group for c in chosen])
        if isinstance(group, Refusal):
            return group
        layouts: dict[int, Layout] = {}
        outputs: list[Layout] = []
        for candidate, count in zip(chosen, counts, strict=True):
            alike = self._alike(candidate.provider, candidate.group, candidate.offer, replace(target, threads=count))
            if isinstance(alike, Refusal):
                return alike
            for value, layout in zip(candidate.group.inputs, alike.inputs, strict=True):
                if layouts.setdefault(value, layout) != layout:
                    return Refusal("two parts read a value in different layouts")
            outputs += alike.outputs
        chosen_lanes = tuple(
            Lane(tuple(LanePart(c.provider, c.offer.variant, len(c.group.outputs)) for c in lane), count)
            for count, lane in zip(threads, lanes, strict=True)
        )
        work_flop = sum(max(c.linear_flop, c.offer.work_flop) for c in chosen)
        inputs = tuple(layouts[value] for value in group.inputs)
        pairs = min((c.offer.pairs for c in chosen if c.offer.pairs), default=0)
        vector_flop = sum(c.offer.vector_flop for c in chosen)
        text = " | ".join(map(str, chosen_lanes))
        offer = Offer(inputs, tuple(outputs), text, work_flop, pairs, vector_flop, lanes=chosen_lanes)
        versions = dict.fromkeys(f"{c.provider} {c.version}" for c in chosen)
        return Candidate(group, self.name, offer, ", ".join((self.version, *versions)))

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Return the kernel that runs the offer's lanes; each part is built for its lane's number of threads."""
        lanes = offer.lanes
        if not lanes:
            return Refusal("it names no kernels to run side by side")
        if sum(lane.threads for lane in lanes) > target.threads:
            return Refusal(f"there are only {target.threads} threads")
        parts = [part for lane in lanes for part in lane.parts]
        counts = [lane.threads for lane in lanes for _ in lane.parts]
        groups = split(group, [part.outputs for part in parts])
        read = dict(zip((v for _, v in group.body.inputs), offer.inputs, strict=True))
        written = iter(offer.outputs)
        kernels = []
        for part, count, own in zip(parts, counts, groups, strict=True):
            outputs = tuple(next(written) for _ in own.outputs)
            wanted = Offer(tuple(read[value] for value in own.inputs), outputs, part.variant)
            few = replace(target, threads=count)
            alike = self._alike(part.provider, own, wanted, few)
            if isinstance(alike, Refusal):
                return alike
            kernel = self._faults.kernel(self._providers[part.provider], own, alike, few)
            if isinstance(kernel, Refusal):
                return kernel
            refusal = team_refusal(kernel) if count > 1 else None
            if refusal is not None:
                return refusal
            if len(own.inputs) + len(own.outputs) >= MOST_BUFFERS:
                return Refusal(f"a part has more than {MOST_BUFFERS - 1} buffers")
            kernels.append(kernel)
        comment = f"{comment_of(group, offer)}\nside by side: {offer.variant}"
        return _print(group, groups, kernels, lanes, target.threads, comment)

    def variants(self, candidate: Candidate, few: Target) -> tuple[Candidate, ...]:
        """Return the kernel's alternatives for a lane: its provider's offers in the same layouts, same variant first.

        The layouts of constants may differ.

        Args:
            candidate: a kernel on all threads.
            few: the machine with only the threads of a lane.
        """
        own = candidate.offer
        alike = self._alike(candidate.provider, candidate.group, own, few)
        offers = self._fitting(candidate.provider, candidate.group, own, few)
        first = () if isinstance(alike, Refusal) else (alike,)
        others = (o for o in offers if o not in first and (o.found_ns > 0) <= candidate.is_found and not o.is_in_place)
        return tuple(replace(candidate, offer=offer) for offer in (*first, *others))

    def _alike(self, provider: str, group: Group, wanted: Offer, few: Target) -> Offer | Refusal:
        """Return a provider's offer for few threads in the same variant and layouts; those of constants may differ."""
        offers = self._answer(provider, group, few)
        if isinstance(offers, Refusal):
            return offers
        same = [offer for offer in self._fitting(provider, group, wanted, few) if offer.variant == wanted.variant]
        exact = [offer for offer in same if offer.inputs == wanted.inputs]
        found = (*exact, *same)
        threads = "one thread" if few.threads == 1 else f"{few.threads} threads"
        return found[0] if found else Refusal(f"{provider} offers no such kernel for {threads}")

    def _fitting(self, provider: str, group: Group, wanted: Offer, few: Target) -> list[Offer]:
        """Return the provider's offers for few threads in the wanted layouts; those of constants may differ."""

        def varying(offer: Offer) -> list[Layout]:
            return [x for i, x in enumerate(offer.inputs) if i not in group.constant_inputs]

        offers = self._answer(provider, group, few)
        known = () if isinstance(offers, Refusal) else offers
        return [o for o in known if o.outputs == wanted.outputs and varying(o) == varying(wanted)]

    def _answer(self, provider: str, group: Group, few: Target) -> Sequence[Offer] | Refusal:
        """Return a provider's answer for few threads; answers are cached."""
        key = (provider, group.key, few)
        if key not in self._offers:
            known = self._providers.get(provider)
            self._offers[key] = (
                Refusal(f"there is no provider {provider}") if known is None else self._faults.offers(known, group, few)
            )
        return self._offers[key]


def _print(
    group: Group, groups: Sequence[Group], kernels: Sequence[Kernel], lanes: Lanes, threads: int, comment: str
) -> Kernel:
    """Return the kernel that runs other kernels in lanes, in one parallel region of `threads` threads."""
    parts = Parts.of(kernels)
    position = group.position
    workspace = len(group.inputs) + len(group.outputs)
    rows: list[str] = []
    slots: list[str] = []
    output, offset = len(group.inputs), 0
    for own, kernel in zip(groups, kernels, strict=True):
        rows.append(parts.row(kernel, len(slots)))
        slots += [f"{{{position[value]}, 0}}" for value in own.inputs]
        slots += [f"{{{output + i}, 0}}" for i in range(len(own.outputs))]
        output += len(own.outputs)
        if kernel.workspace_bytes:
            slots.append(f"{{{workspace}, {offset}}}")
            offset += align_up(kernel.workspace_bytes)
    head = "".join(f"// {line}\n" for line in comment.splitlines())
    threading = Threading.CALLER if _is_alone(lanes) else Threading.TEAM
    if parts.has_state or parts.libraries or any(kernel.threading is Threading.OWN for kernel in kernels):
        threading = Threading.OWN
    tables = _tables(rows, slots, lanes, threads, parts.has_state)
    return named_kernel(
        "\n".join((head, *parts.sources, *tables)),
        has_state=parts.has_state,
        workspace_bytes=offset,
        libraries=parts.libraries,
        opens=parts.opens,
        threading=threading,
    )


def _is_alone(lanes: Lanes) -> bool:
    """Return whether all parts run in the calling thread."""
    return len(lanes) == lanes[0].threads == 1


def _tables(parts: Sequence[str], slots: Sequence[str], lanes: Lanes, threads: int, has_state: bool) -> Iterator[str]:
    is_alone = _is_alone(lanes)
    yield '#include "korch_concurrent.h"\n'
    yield f"static const korch_concurrent::Part NAME_parts[] = {{{', '.join(parts)}}};"
    yield f"static const korch_concurrent::Slot NAME_slots[] = {{{', '.join(slots)}}};"
    call = "run_alone(NAME_parts, NAME_slots, state, buffers)"
    if not is_alone:
        ends = accumulate(len(lane.parts) for lane in lanes)
        yield f"static const int NAME_ends[] = {{{', '.join(map(str, ends))}}};"
        counts = ", ".join(str(lane.threads) for lane in lanes)
        yield f"static const int NAME_threads[] = {{{counts}}};"
        lanes_call = "korch_concurrent::run_lanes(NAME_parts, NAME_slots, NAME_ends, NAME_threads"
        yield (
            '\nextern "C" int NAME_team(void* const* buffers, korch::Member& own) {\n'
            f"  return {lanes_call}, nullptr, buffers, own);\n}}"
        )
        body = f"return {lanes_call}, state, buffers, own);"
        call = f"run_region<{threads}>([&](korch::Member& own) {{\n    {body}\n  }})"
    if has_state:
        yield (
            '\nextern "C" void* NAME_create(int, char* error, size_t error_size) {\n'
            "  return korch_concurrent::create(NAME_parts, error, error_size);\n}\n\n"
            'extern "C" void NAME_destroy(void* state) {\n'
            "  korch_concurrent::destroy(NAME_parts, state);\n}"
        )
    yield (f'\nextern "C" int NAME_run(void* state, void* const* buffers) {{\n  return korch_concurrent::{call};\n}}\n')
