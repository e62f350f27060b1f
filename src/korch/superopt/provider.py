"""The provider of programs that the superoptimizer finds.

All groups of a model are searched before providers are asked for offers, unless their results are in the database.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.candidate.shape import Compose
from korch.measure.cpu import CpuMeter
from korch.measure.meter import AnyMeter
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.provider.content import content_version
from korch.provider.generated import stream_bytes
from korch.provider.provider import Facts, Kernel
from korch.provider.tile_kernel import kernel_of
from korch.report.units import time_text
from korch.search.ledger import Ledger
from korch.segments.block import Partition
from korch.superopt.choose import ranked
from korch.superopt.find import (
    DEFAULT_EFFORT,
    LATE,
    Effort,
    Finding,
    FoundProgram,
    finding_text,
    read_finding,
    timed_search,
)
from korch.superopt.groups import superopt_groups
from korch.superopt.sizes import CacheMachine
from korch.system.deadline import Deadline
from korch.target import Target
from korch.tile.ir.growth import TextLimitError

Answer = Callable[[str, object, Callable[[], str]], str]
"""Returns the answer to a question of some kind: the result of a function, or, in a replay, the recorded answer."""


class SuperoptProvider:
    """Offers the programs that were found for a group, and makes their kernels."""

    name = "superopt"
    version = content_version("superopt")

    def __init__(self, facts: Facts, machine: CacheMachine, effort: Effort = DEFAULT_EFFORT) -> None:
        """Store results in `facts`, under the version and an effort that differs from the default."""
        self.facts, self.machine, self.effort = facts, machine, effort
        self.other = "" if effort == DEFAULT_EFFORT else f" {asdict(effort)}"
        self.known: dict[str, Finding] = {}

    @property
    def group_shapes(self) -> tuple[Compose]:
        """The function that yields the groups of a graph for which there are programs."""
        return (self._groups,)

    def _groups(self, graph: PrimitiveGraph, groups: Sequence[Group]) -> Iterator[Group]:
        return (group for group in superopt_groups(graph) if self.find(group).programs)

    def find(self, group: Group) -> Finding:
        """Return what was found for a group."""
        return self.known.get(group.key) or Finding(reason="it was not searched")

    def search(self, groups: Iterable[Group], answer: Answer, deadline: Deadline) -> None:
        """Take the stored results of groups; search those without one until the deadline."""
        for group in groups:
            text = answer("superopt", group.key, partial(self._result, group, deadline))
            self.known[group.key] = read_finding(text) or Finding(reason="its record is damaged")

    def _result(self, group: Group, deadline: Deadline) -> str:
        """Return the finding of a group as text; it is stored if more time would not change it."""
        name = f"{self._fact} {self.machine}{self.other} {group.key}"
        kept = self.facts.fact(name)
        if kept is not None and read_finding(kept) is not None:
            return kept
        finding, is_lasting = timed_search(group, self.machine, deadline, self.effort)
        text = finding_text(finding)
        if is_lasting:
            self.facts.put_fact(name, text)
            self.facts.put_fact(self._fact, "kept")
        return text

    @property
    def _fact(self) -> str:
        """The name of the fact that there are results; their names begin with it."""
        return f"superopt {self.version}"

    def has_results(self, fact: Callable[[str], str | None]) -> bool:
        """Return whether results of an earlier search are stored, for any model."""
        return fact(self._fact) is not None

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the programs found for a group, the best first; they may read constant matrices packed in panels."""
        finding = self.find(group)
        return [_offer(group, found) for found in finding.programs] or Refusal(finding.reason or "no program is found")

    def found(self, group: Group, offer: Offer) -> FoundProgram:
        """Return the program of an offer."""
        return next(found for found in self.find(group).programs if found.name == offer.variant)

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the program."""
        found = self.found(group, offer)
        remark = "\nfound:\n" + "\n".join(found.steps) + "\n" + found.text
        try:
            return kernel_of(found.program, group, offer, target, stream_bytes=stream_bytes(target), remark=remark)
        except TextLimitError as error:
            return Refusal(str(error))

    def describe(self, group: Group, offer: Offer) -> tuple[str, ...]:
        """Return the steps and the text of an offer's program."""
        found = self.found(group, offer)
        return (
            f"found by the superoptimizer (estimated {time_text(found.estimate_ns)})",
            "its steps, by the classes of equal expressions:",
            *(f"  {line}" for line in found.steps),
            "",
            "its tile program:",
            *(f"  {line}" for line in found.text.splitlines()),
        )

    def report(self) -> tuple[str, ...]:
        """Return how many programs were found, and what was visited and pruned; nothing if there were no groups."""
        findings = self.known.values()
        if not findings:
            return ()
        late = sum(finding.reason == LATE for finding in findings)
        programs = [len(finding.programs) for finding in findings]
        visited, seconds = sum(f.visited for f in findings), sum(f.seconds for f in findings)
        lines = [
            f"superoptimizer: {sum(programs)} programs for {sum(map(bool, programs))} of {len(findings)} groups, "
            f"{visited:,} prefixes visited in {seconds:.1f} s"
            + (f"; no time was left for {late} groups" if late else "")
        ]
        for what in ("pruned", "refused"):
            counts = sum((Counter(getattr(finding, what)) for finding in findings), Counter[str]())
            if counts:
                lines.append(f"  {what}: " + ", ".join(f"{reason} {n:,}" for reason, n in counts.most_common()))
        return tuple(lines)


def _offer(group: Group, found: FoundProgram) -> Offer:
    inputs = list(group.plain_layouts[0])
    for position, columns in found.packed:
        rank = group.input_types[position].rank
        inputs[position] = Layout((*range(rank - 2), rank - 1, rank - 2), ((rank - 1, columns),))
    return Offer(tuple(inputs), group.plain_layouts[1], found.name)


def add_superopt(
    meter: AnyMeter, partition: Partition, work_flop: int, ledger: Ledger, options: Options, deadline: Deadline
) -> str:
    """Add the provider of found programs to a CPU's meter; return what was found, "" if there is no such provider.

    The programs reorder operations, and their speed must be measured. So there are none with the option `strict` or
    without measurements.

    `options`: `superopt_s` is the time of the search; without it, only results in the database are used.
    """
    seconds = options.superopt_s
    if not isinstance(meter, CpuMeter) or seconds == 0 or not options.measure or options.strict:
        return ""
    target = meter.target
    machine = CacheMachine(target.lanes, target.threads, target.l2_bytes)
    provider = SuperoptProvider(meter.database, machine)
    if seconds is None and not provider.has_results(ledger.fact):
        return ""
    groups = ((g, len(block.instances)) for block in partition.blocks for g in superopt_groups(block.graph))
    end = deadline.until(time.monotonic() + (seconds or 0.0))
    provider.search(ranked(groups, machine, work_flop), ledger.answer, end)
    if seconds is None:
        provider.known = {key: found for key, found in provider.known.items() if found.reason != LATE}
    if provider.known:
        meter.add_provider(provider)
    return next(iter(provider.report()), "")
