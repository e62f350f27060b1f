"""Blocks with their alternatives -> tile programs that the superoptimizer finds for their groups.

It runs in a separate process, while providers are asked for all other groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from korch.candidate.candidate import Candidate, Group, Offer
from korch.limits import SearchLimits
from korch.measure.cpu import CpuMeter
from korch.pipeline.run import Run
from korch.segments.block import Partition
from korch.superopt.beside import SearchBeside
from korch.superopt.choose import ranked
from korch.superopt.find import Finder, FoundProgram
from korch.superopt.groups import superopt_groups
from korch.superopt.sizes import CacheMachine
from korch.system.deadline import Deadline

SHARE = 0.1  # the superoptimizer's share of a budget
SECONDS = 20.0  # its time, without a budget


@runtime_checkable
class TakesPrograms(Protocol):
    """A provider that also offers programs found by its `finder`."""

    name: str
    version: str
    finder: Finder | None

    def found(self, group: Group, offer: Offer) -> FoundProgram | None:
        """Return the found program of an offer, or None if the offer has none."""
        ...


class ProgramSearch:
    """A concurrent search for programs; providers offer its results after it has ended.

    Attributes:
        awaited: the keys of the groups that are searched. Providers must not be asked for them before the end.
    """

    def __init__(self, run: Run) -> None:
        """Start the search, if the options allow it and the target is a CPU."""
        self.awaited: frozenset[str] = frozenset()
        self._run = run
        self._begun: list[tuple[Finder, list[Group], SearchBeside]] = []
        meter, options = run.meter, run.options
        if not (isinstance(meter, CpuMeter) and options.has_superopt):
            return
        target = meter.target
        machine = CacheMachine(target.lanes, target.threads, target.l2_bytes)
        deadline, limits = end_of(run), options.search
        for provider in meter.providers:
            if isinstance(provider, TakesPrograms):
                provider.finder = finder = Finder(meter.database, machine, provider.version, limits)
                work_flop = run.split.total_flop
                groups = list(ranked(_groups(run.partition, limits), machine, work_flop))
                new = [] if run.ledger.is_replayed else [group for group in groups if not finder.is_kept(group)]
                beside = run.resources.enter_context(SearchBeside(new, machine, limits, deadline))
                self._begun.append((finder, groups, beside))
                self.awaited |= {group.key for group in groups}

    def end(self) -> None:
        """Wait until the search has ended, and pass its results to the providers."""
        run = self._run
        for finder, groups, beside in self._begun:
            finder.take_all(groups, run.ledger.answer, beside.findings())
            run.found = finder.report()
            if run.found.groups:
                run.progress("candidates", str(run.found))


def end_of(run: Run) -> Deadline:
    """Return the deadline of the superoptimizer."""
    given_s = run.options.superopt_s
    if given_s is None and run.options.budget_s is not None:
        return run.build_deadline.less(1 - SHARE)
    return run.deadline.until(time.monotonic() + (SECONDS if given_s is None else given_s))


def _groups(partition: Partition, limits: SearchLimits) -> Iterator[tuple[Group, int]]:
    """Yield the groups of all blocks, each with how often the model has it."""
    for block in partition.blocks:
        for group in superopt_groups(block.graph, limits):
            yield group, len(block.instances)


def found_programs(run: Run, steps: Iterable[Candidate]) -> dict[str, FoundProgram]:
    """Return the found programs of a plan's candidates, by candidate key, without those inside concurrent kernels."""
    generators = (p for p in run.meter.providers if isinstance(p, TakesPrograms))
    found = {c.key: g.found(c.group, c.offer) for g in generators for c in steps if c.provider == g.name}
    return {key: program for key, program in found.items() if program is not None}
