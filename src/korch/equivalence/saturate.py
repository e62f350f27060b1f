"""Adds alternatives to a primitive graph by equality saturation.

In each round every rule is matched against the graph as it is at the start of the round, each value
that a rule builds is merged with the value at which it matched, and then congruence is restored. The
loop ends when a round changes nothing or a limit is reached. The order of rules, primitives and merges
is fixed, so the result is the same on every run (unless the limit in seconds ends it). Equality
saturation: Tate et al. (POPL 2009); with one rebuild per round: Willsey et al., egg (POPL 2021).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from korch.equivalence.rule import AnyRule, RuleRefusal, View, Writer
from korch.equivalence.rules import RULES
from korch.errors import OptionError
from korch.primitive.graph import Constant, GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.tied import tied_constants
from korch.primitive.walks import reached
from korch.system.deadline import Deadline

logger = logging.getLogger("korch.equivalence")

Stop = Literal["saturated", "iterations", "values", "seconds"]


@dataclass(frozen=True, slots=True)
class SaturationLimits:
    """The limits that stop saturation before it is complete.

    Attributes:
        iterations: most rounds.
        values: most values in the growing graph, dead ones included; a round is aborted when they
            are exceeded.
        seconds: longest time; if it is reached, the result depends on the machine.

    Raises:
        OptionError: a limit is not positive.
    """

    iterations: int = 16
    values: int = 50_000
    seconds: float = 60.0

    @staticmethod
    def of(primitives: int) -> SaturationLimits:
        """Return the limits for a model with this number of primitives that is saturated as a whole.

        The time limit allows for a busy machine: on an idle one, 1,000 primitives take some seconds.
        """
        share = max(1.0, primitives / 1000)
        return SaturationLimits(values=int(50_000 * share), seconds=240.0 * share)

    def __post_init__(self) -> None:
        for name in ("iterations", "values", "seconds"):
            if not getattr(self, name) > 0:
                raise OptionError(
                    f"the value {getattr(self, name)} is not positive",
                    where=f"limit {name} of saturation",
                    expected="more than 0",
                )


@dataclass(frozen=True, slots=True)
class RuleReport:
    """The effects of one rule.

    Attributes:
        name: the rule's name.
        law: the rule's law.
        fired: how many matches changed the graph.
        refused: how many places it refused, by reason.
        refusals: each refusal; its `value` is an id of the graph given to `saturate` if it is
            smaller than that graph's number of values.
        is_off: whether it was not tried, because it reorders and `strict` was asked for.
        failures: the errors that it raised; each is a fault of the rule, which was not applied to
            that match.
    """

    name: str
    law: str
    fired: int
    refused: Mapping[str, int]
    refusals: tuple[RuleRefusal, ...]
    is_off: bool
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaturationReport:
    """The effects of saturation.

    Attributes:
        rules: per rule, in the order of the rules.
        stopped: "saturated", or the limit that ended it.
        iterations: rounds.
        primitives_before: primitives of the graph given.
        primitives_after: primitives of the result.
        alternatives: primitives of the result beyond one per value.
        seconds: time taken.
    """

    rules: tuple[RuleReport, ...]
    stopped: Stop
    iterations: int
    primitives_before: int
    primitives_after: int
    alternatives: int
    seconds: float

    def __str__(self) -> str:
        stopped = "" if self.stopped == "saturated" else f", stopped by the limit of {self.stopped}"
        lines = [
            f"{self.primitives_before} primitives became {self.primitives_after}, "
            f"{self.alternatives} of them alternatives; {self.iterations} rounds, "
            f"{self.seconds:.2f} s{stopped}"
        ]
        for rule in self.rules:
            if rule.is_off:
                lines.append(f"{rule.name}: off, it reorders")
            elif rule.fired or rule.refused or rule.failures:
                reasons = [f"{n} refused: {reason}" for reason, n in rule.refused.items()]
                reasons += [f"failed, which is a fault of Korch: {e}" for e in rule.failures]
                lines.append("; ".join([f"{rule.name}: {rule.fired} fired", *reasons]))
        return "\n".join(lines)


def saturate(
    graph: PrimitiveGraph,
    *,
    strict: bool,
    limits: SaturationLimits | None = None,
    rules: Sequence[AnyRule] = RULES,
    deadline: Deadline | None = None,
    keep: Callable[[Constant], Constant] | None = None,
) -> tuple[PrimitiveGraph, SaturationReport]:
    """Add the alternatives that the rules find.

    Args:
        graph: a graph; it may have alternatives already.
        strict: leave out the rules that re-associate floating-point operations.
        limits: when to stop; the defaults of `SaturationLimits` if None.
        rules: the rules, in the order in which they are tried. If a rule raises an error, it is not
            applied to that match, and the report contains the error.
        deadline: when to stop, in addition to the limits.
        keep: maps a constant that a rule computed to an equal one to store in its place.

    Returns:
        The graph with alternatives, renumbered, and the report.
    """
    run = _Saturation(
        graph, [r for r in rules if not (strict and r.reorders)], limits or SaturationLimits(), deadline or Deadline()
    )
    run.builder.keep = keep or run.builder.keep
    stopped = run.run()
    result = without_circular(run.builder.freeze())
    return result, SaturationReport(
        rules=tuple(run.report(rule) for rule in rules),
        stopped=stopped,
        iterations=run.iterations,
        primitives_before=len(graph.primitives),
        primitives_after=len(result.primitives),
        alternatives=result.alternatives,
        seconds=time.monotonic() - run.begin_s,
    )


def joined_reports(whole: SaturationReport, parts: SaturationReport) -> SaturationReport:
    """Return the report on a model that was saturated as a whole, and then in parts by the other rules."""
    rules = {rule.name: rule for rule in (*whole.rules, *parts.rules)}
    stops = (whole.stopped, parts.stopped)
    return replace(
        parts,
        rules=tuple(rules[rule.name] for rule in RULES if rule.name in rules),
        stopped=next((stop for stop in stops if stop != "saturated"), "saturated"),
        iterations=max(whole.iterations, parts.iterations),
        primitives_before=whole.primitives_before,
        seconds=whole.seconds + parts.seconds,
    )


def merge_reports(reports: Sequence[tuple[SaturationReport, Sequence[int]]]) -> SaturationReport:
    """Return the merged report of the reports on parts of a model.

    `reports`: at least one report, all with the same rules, each with the model's value for every value of its part's
    graph.
    """
    first, _ = reports[0]
    if len(reports) == 1:
        return first
    rules = []
    for number, rule in enumerate(first.rules):
        refusals = []
        for report, values in reports:
            for refusal in report.rules[number].refusals:
                is_known = refusal.value < len(values)
                refusals.append(replace(refusal, value=values[refusal.value] if is_known else -1))
        rules.append(
            replace(
                rule,
                fired=sum(report.rules[number].fired for report, _ in reports),
                refused=dict(Counter(r.reason for r in refusals)),
                refusals=tuple(refusals),
                failures=tuple(e for report, _ in reports for e in report.rules[number].failures),
            )
        )
    found = [report for report, _ in reports]
    return SaturationReport(
        rules=tuple(rules),
        stopped=next((r.stopped for r in found if r.stopped != "saturated"), "saturated"),
        iterations=max(r.iterations for r in found),
        primitives_before=sum(r.primitives_before for r in found),
        primitives_after=sum(r.primitives_after for r in found),
        alternatives=sum(r.alternatives for r in found),
        seconds=sum(r.seconds for r in found),
    )


def without_circular(graph: PrimitiveGraph) -> PrimitiveGraph:
    """Return the graph without alternatives that need their own output.

    Such an alternative, for example a reshape back to the value's origin, is in no plan, but paths
    through it would prevent the primitives around it from becoming one kernel.
    """
    first = first_known(graph)
    last = len(first)
    kept = [
        p
        for p, primitive in enumerate(graph.primitives)
        if all(first.get(v, last) < first.get(primitive.output, 0) for v in primitive.inputs)
        or not _is_circular(graph, primitive, first)
    ]
    if len(kept) == len(graph.primitives):
        return graph
    return graph.with_primitives(kept)


def first_known(graph: PrimitiveGraph) -> dict[int, int]:
    """Return the order in which values become known if all primitives run that can; other values are missing.

    A value that is known before a primitive's output does not need it, which avoids most of the search.
    """
    waits = [len(set(primitive.inputs)) for primitive in graph.primitives]
    found: dict[int, int] = {}
    ready = deque(sorted(graph.given))
    ready.extend(p.output for p in graph.primitives if not p.inputs)
    while ready:
        value = ready.popleft()
        if value in found:
            continue
        found[value] = len(found)
        for p in graph.consumers[value]:
            waits[p] -= 1
            if not waits[p]:
                ready.append(graph.primitives[p].output)
    return found


def _is_circular(graph: PrimitiveGraph, primitive: Primitive, first: Mapping[int, int]) -> bool:
    """Return whether some input of an alternative can't be computed without its output.

    `first`: the result of `first_known`, by which only values that become known later are looked at.
    """
    output, last = primitive.output, len(first)
    place = first.get(output, last)
    if len(graph.producers[output]) == 1:
        return False
    if output in primitive.inputs:
        return True

    def later(p: Primitive) -> set[int]:
        """Return the inputs of a primitive that may need the output."""
        return {v for v in p.inputs if v == output or (v not in graph.given and first.get(v, last) >= place)}

    def makers(value: int) -> Iterator[Primitive]:
        return (graph.primitives[p] for p in graph.producers[value])

    asked = later(primitive)
    values = reached(asked, lambda v: (u for p in makers(v) for u in later(p) if u != output))
    waiting = [(v, needed) for v in values for p in makers(v) if output not in (needed := later(p))]
    known: set[int] = set()
    while new := {v for v, needed in waiting if needed <= known} - known:
        known |= new
    return not asked <= known


@dataclass
class _Saturation:
    """The state of one run: the growing graph, and the rules fired and refused so far.

    A rule is tried again at a root only if something that it read there has changed since: `tried` has what it read.
    """

    graph: PrimitiveGraph
    rules: Sequence[AnyRule]
    limits: SaturationLimits
    deadline: Deadline
    builder: GraphBuilder = field(init=False)
    begin_s: float = field(default_factory=time.monotonic)
    iterations: int = 0
    value_count: int = 0
    done: set[tuple[str, object]] = field(default_factory=set)
    fired: Counter[str] = field(default_factory=Counter)
    refusals: dict[tuple[str, object], RuleRefusal] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    view: View | None = None
    tried: dict[tuple[str, Primitive], frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = GraphBuilder.from_graph(self.graph)
        self.builder.tied = tied_constants(self.graph)
        self.builder.rebuild()

    def run(self) -> Stop:
        """Run rounds until nothing changes or a limit is reached, and return which."""
        first = [rule for rule in self.rules if not rule.is_last]
        last = [rule for rule in self.rules if rule.is_last]
        stopped = self._run(first)
        if stopped == "saturated" and last:
            stopped = self._round(last) or self._run(first)
        return stopped

    def _run(self, rules: Sequence[AnyRule]) -> Stop:
        while self.iterations < self.limits.iterations:
            self.iterations += 1
            before = self.fired.total()
            hit = self._round(rules)
            if hit:
                return hit
            if self.fired.total() == before:
                return "saturated"
        return "iterations"

    def _round(self, rules: Sequence[AnyRule]) -> Stop | None:
        hit = self._try_all(rules)
        self.builder.rebuild()
        return hit

    def _try_all(self, rules: Sequence[AnyRule]) -> Stop | None:
        view = View(self.builder, [value for _, value in self.graph.outputs])
        if self.view is not None:
            changed = view.changed_since(self.view)
            self.tried = {key: read for key, read in self.tried.items() if read.isdisjoint(changed)}
        self.view = view
        for rule in rules:
            for root in view.primitives:
                key = rule.name, root
                if root.op not in rule.roots or root.output in root.inputs or key in self.tried:
                    continue
                view.read = {*root.inputs, root.output}
                self._try(rule, root, view)
                self.tried[key] = frozenset(view.read)
                if self.value_count > self.limits.values:
                    return "values"
                is_late = time.monotonic() - self.begin_s > self.limits.seconds
                if is_late or self.deadline.is_over:
                    return "seconds"
        return None

    def _try(self, rule: AnyRule, root: Primitive, view: View) -> None:
        try:
            found = [(match, (rule.name, (root, match))) for match in rule.match(view, root)]
        except Exception as error:  # noqa: BLE001 - whatever a rule does wrong
            self._fail(rule, root, error)
            return
        for match, key in found:
            if key in self.done:
                continue
            try:
                self._apply(rule, root, view, match, key)
            except Exception as error:  # noqa: BLE001
                self.done.add(key)
                self._fail(rule, root, error)

    def _apply(self, rule: AnyRule, root: Primitive, view: View, match: object, key: tuple[str, object]) -> None:
        write = rule.rewrite(view, match)
        if isinstance(write, RuleRefusal):
            self.refusals[key] = write
            if write.is_final:
                self.done.add(key)
            return
        built = write(Writer(self.builder, rule.name))
        self.done.add(key)
        self.refusals.pop(key, None)
        # A new primitive gets a new value, so if the two are already equal, nothing was added.
        is_new = self.builder.find(built) != self.builder.find(root.output)
        self.builder.merge(root.output, built)
        self.fired[rule.name] += is_new
        self.value_count = max(self.value_count, built + 1)

    def _fail(self, rule: AnyRule, root: Primitive, error: Exception) -> None:
        """Record that a rule raised an error; it is not applied to that match."""
        if isinstance(error, MemoryError):
            raise error
        text = f"at {root.op}: {type(error).__name__}: {error}"
        if text not in self.failures[rule.name]:
            self.failures[rule.name].append(text)
            logger.warning("the rule %s failed %s; it is not applied there", rule.name, text, extra={"fault": True})
            logger.info("the rule %s failed", rule.name, exc_info=error)

    def report(self, rule: AnyRule) -> RuleReport:
        """Return the report on a rule."""
        refusals = tuple(r for (name, _), r in self.refusals.items() if name == rule.name)
        return RuleReport(
            name=rule.name,
            law=rule.law,
            fired=self.fired[rule.name],
            refused=dict(Counter(r.reason for r in refusals)),
            refusals=refusals,
            is_off=rule not in self.rules,
            failures=tuple(self.failures[rule.name]),
        )
