"""One kernel of a plan as text: what it computes, what limits its time, and its alternatives.

The limit follows from its lower bound: the least time for its operations or its bytes at the rates of the
machine. A kernel near its bound can only be replaced by another grouping, layout or rewrite that is faster.
For a kernel far from its bound, a faster kernel may be possible, unless it is very short.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.candidate.layout import Layout
from korch.costs.rates import Rates
from korch.equivalence.rule import rule_of
from korch.errors import OptionError
from korch.primitive.text import printed_calls
from korch.primitive.types import ValueType
from korch.report.assembly import code_lines
from korch.report.units import count_text, cut, size_text, time_text
from korch.runtime.record import PlanRecord, PortRecord, StepRecord
from korch.runtime.report import GroupingRecord, Report, Rival
from korch.search.result import PlanName

MOST_SLOWEST = 3

MOST_CHARACTERS = 160
"""The most characters of a primitive's line; its indices and constants may be long."""

MOST_LINES = 80
"""The most lines of a loop's assembly; the page has all of them."""

MOST_OPERATIONS = 70
"""The most characters for a kernel's operations in a line."""

SHORT_NS = 5000
"""In shorter kernels, the call and the start of the threads take a large part of the time."""

FAR = 0.4
"""A bound explains the time of a kernel if it is at least this share of the time."""

SLACK = 0.02
CALL_NS = 500
"""If a bound exceeds the time for the bytes by more than `SLACK` and `CALL_NS`, the kernel is limited by operations."""

_LEVELS = ("L1", "L2", "L3")

_LARGE = ("Conv", "Gemm", "MatMul", "QLinear", "Attention", "LSTM", "GRU", "RNN")
"""Operators by which a kernel is named, if it runs one of them."""


def slowest(plan: PlanRecord, report: Report) -> list[tuple[int, tuple[str, ...]]]:
    """Return the most expensive kernels, each with texts about its cost, its limit and its nearest rival."""
    total_ns = sum(step.cost_ns for step in plan.steps)
    order = sorted(range(len(plan.steps)), key=lambda n: -plan.steps[n].cost_ns)
    lines = []
    for number in order[:MOST_SLOWEST]:
        step = plan.steps[number]
        share = f"{100 * step.cost_ns / (total_ns or 1.0):.0f} % of the time"
        parts = [
            f"{_cost(step)}, {share}: {cut(operations(step), 40)}, made by {step.provider}",
            why(step, report.machine),
        ]
        if rival := nearest_rival(number, plan, report):
            parts.append(rival)
        lines.append((number, tuple(parts)))
    return lines


def why(step: StepRecord, machine: Rates) -> str:
    """Return what limits a kernel, and how near it is to that limit."""
    if not step.is_measured:
        return "not measured: its bound stands for its time"
    if not step.cost_ns or not step.bound_ns:
        return "it takes no time"
    least_ns = step.bound_ns * machine.margin
    share = min(1.0, least_ns / step.cost_ns)
    limit = limit_of(step, machine)
    if limit == "operations":
        name, work, rate = "arithmetic", "its arithmetic", "the machine's peak"
    else:
        name = rate = f"the bandwidth of {limit}"
        work = f"moving its {size_text(step.size_bytes)}"
    near = f"{100 * share:.0f} % of {rate}" if limit else f"{1 / share:.1f} times its lower bound"
    if share >= FAR:
        return f"limited by {name}, at {near}" if limit else f"at {near}"
    if step.cost_ns < SHORT_NS:
        return f"so short that starting it takes most of the time; at {near}"
    least = f"{work if limit else 'its work'} alone would take {time_text(least_ns)}"
    return f"at {near}: {least}, so a faster kernel may be possible"


def limit_of(step: StepRecord, machine: Rates) -> str:
    """Return what limits a kernel: "operations", or the name of a memory level; "" if no rates are known."""
    levels = machine.levels
    limits = [level.limit_bytes for level in levels]
    own = next((i for i, n in enumerate(limits) if n == 0 or step.size_bytes <= n), None)
    if own is not None:
        written = sum(port_bytes(port) for port in step.outputs)
        read_rate, write_rate = levels[own].read_bytes_per_s, levels[own].write_bytes_per_s
        seconds = max(
            (step.size_bytes - written) / read_rate, written / write_rate, step.size_bytes / (read_rate + write_rate)
        )
        memory = _LEVELS[own] if limits[own] and own < len(_LEVELS) else "memory"
    elif machine.copy_bytes_per_s:
        seconds, memory = step.size_bytes / machine.copy_bytes_per_s, "memory"
    else:
        return ""
    is_more = step.bound_ns > CALL_NS + (1 + SLACK) * 1e9 * seconds
    return "operations" if is_more else memory


def nearest_rival(number: int, plan: PlanRecord, report: Report) -> str:
    """Return the measured alternative to a kernel with the nearest cost; "" if there is none.

    Candidates with other layouts are left out, because they need changes of layout.
    """
    step = plan.steps[number]
    layouts = _layouts(step)
    found = [
        (row.cost_ns - step.cost_ns, step.cost_ns, row.provider)
        for row in report.rivals.get(step.candidate, ())
        if row.is_measured and row.layouts == layouts
    ]
    found += [(row.cost_ns - row.instead_ns, row.instead_ns, _others(row)) for row in groupings_of(number, report)]
    if not found or not step.cost_ns:
        return ""
    more_ns, instead_ns, what = min(found)
    told = f"{_signed(more_ns / (instead_ns or 1))}, {what}"
    if more_ns < 0:
        return f"faster by itself, but not in the plan: {told}; {_not_taken(-more_ns, plan, report)}"
    return f"nearest rival {told}"


def _layouts(step: StepRecord) -> str:
    inputs, outputs = (", ".join(p.layout for p in ports) for ports in (step.inputs, step.outputs))
    return f"({inputs}) -> ({outputs})"


def _not_taken(saved_ns: float, plan: PlanRecord, report: Report) -> str:
    """Return why kernels are not in the plan although the plan would be faster with them."""
    total_ns = sum(step.cost_ns for step in plan.steps)
    gap = plan.options.get("search", {}).get("gap", 0.0)
    if report.plan not in (None, PlanName.SEARCHED):
        return "this plan was kept because it ran faster as a whole than the search's own"
    if report.stopped_by_budget:
        return "the budget ended the search before it was used; a longer search may use it"
    if saved_ns <= gap * total_ns:
        saved = f"it would save {100 * saved_ns / total_ns:.1f} % of the plan"
        return f"{saved}, and the search stops within {100 * gap:.0f} % of its bound (SearchLimits.gap)"
    return "the search ended before it was used, or this kernel's time rose when the plan's kernels were measured again"


def groupings_of(number: int, report: Report) -> Sequence[GroupingRecord]:
    """Return the other groupings of a kernel that the report has."""
    return report.groupings[number] if number < len(report.groupings) else ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """Texts about an alternative to a kernel."""

    what: str  # the kernels that would run
    cost: str  # their cost
    more: str  # how much more they cost, or why they do not run
    lost: str = ""  # why they are not in the plan although they cost less; "" if they do not cost less
    instead: str = ""  # for another grouping, the kernels that would not run


def grouping_row(row: GroupingRecord, plan: PlanRecord, report: Report) -> Alternative:
    """Return the texts of another grouping."""
    more_ns = row.cost_ns - row.instead_ns
    return Alternative(
        what=" | ".join(f"{kernel.provider}: {kernel.operations}" for kernel in row.kernels),
        cost=f"{time_text(row.cost_ns)} instead of {time_text(row.instead_ns)}",
        more=_signed(more_ns / (row.instead_ns or 1)),
        lost=_not_taken(-more_ns, plan, report) if more_ns < 0 else "",
        instead=", ".join(f"#{n}" for n in row.instead),
    )


def rival_row(row: Rival, step: StepRecord, plan: PlanRecord, report: Report) -> Alternative:
    """Return the texts of a candidate for the same primitives."""
    what = f"{row.provider} {row.layouts} {row.variant}".rstrip()
    if row.failure:
        return Alternative(what, "fails", row.failure)
    if not row.is_measured:
        return Alternative(what, f"≥ {time_text(row.cost_ns)}", "not measured")
    more = _signed(row.cost_ns / step.cost_ns - 1) if step.cost_ns else "-"
    saved_ns, lost = step.cost_ns - row.cost_ns, ""
    if saved_ns > 0 and row.layouts != _layouts(step):
        lost = "it uses other layouts, and its time leaves out the changes of layout around it"
    elif saved_ns > 0:
        lost = _not_taken(saved_ns, plan, report)
    return Alternative(what, time_text(row.cost_ns), more, lost)


def kernel_text(plan: PlanRecord, report: Report, number: int, sources: Mapping[str, str] | None = None) -> str:
    """Return the explanation of one kernel.

    `plan`: the kernels in order. `sources`: the artifact's sources by file name, which have its code.

    Raises:
        CompileError: the kernel's assembly can't be made.
        OptionError: there is no such kernel.
    """
    if not 0 <= number < len(plan.steps):
        raise OptionError(
            f"there is no kernel {number}", where="option --kernel", expected=f"0 to {len(plan.steps) - 1}"
        )
    step = plan.steps[number]
    total_ns = sum(other.cost_ns for other in plan.steps) or 1.0
    variant = f", {step.variant}" if step.variant else ""
    origins, rules = origins_of(step)
    source = "what rules wrote" if rules else "a change of layout"
    lines = [
        f"kernel {number} of {len(plan.steps)}: {operations(step)}",
        f"made by    {step.provider}{variant}",
        f"cost       {_cost(step)}, {100 * step.cost_ns / total_ns:.1f} % of the sum; bound {time_text(step.bound_ns)}",
        f"why        {why(step, report.machine)}",
        f"reads      {'; '.join(map(port_text, step.inputs)) or 'nothing'}",
        f"writes     {'; '.join(map(port_text, step.outputs))}",
        f"moves      {size_text(step.size_bytes)}, computes {count_text(step.work_flop)}FLOP",
        f"from       {', '.join(origins) or source}",
        f"rules      {', '.join(rules) or 'none'}",
        f"source     {_source(step)}",
    ]
    same = [rival_row(row, step, plan, report) for row in report.rivals.get(step.candidate, ())]
    lines += ["", "other candidates for exactly these primitives:"]
    for row in same:
        lines.append(f"  {row.more:>9}  {row.cost:>10}  {row.what}")
        lines += [f"             not in the plan: {row.lost}"] if row.lost else []
    lines += [] if same else ["  none"]
    others = [grouping_row(row, plan, report) for row in groupings_of(number, report)]
    lines += ["", "other groupings that were measured, changes of layout included:"]
    for row in others:
        lines.append(f"  {row.more:>9}  {row.cost}, instead of {row.instead}:")
        lines.append(f"             {row.what}")
        lines += [f"             not in the plan: {row.lost}"] if row.lost else []
    lines += [] if others else ["  none"]
    body = (cut(line, MOST_CHARACTERS) for line in step.primitives.splitlines())
    description = ["", *report.described[step.candidate]] if step.candidate in report.described else []
    code = ["", *code_lines(sources, step.symbol, MOST_LINES)] if sources else []
    return "\n".join([*lines, *description, "", "primitives:", *body, *code])


def origins_of(step: StepRecord) -> tuple[list[str], list[str]]:
    """Return the model's operators that a kernel runs a part of, and the rules that it uses."""
    operators = [origin for origin in step.origins if origin and not rule_of(origin)]
    return operators, sorted({rule for origin in step.origins if (rule := rule_of(origin))})


def layer_of(step: StepRecord) -> str:
    """Return the operator of the model that a kernel is best known by, and the number of the others; "" if none."""
    names, _ = origins_of(step)
    if not names:
        return ""
    main = next((name for name in names if name.startswith(_LARGE)), names[0])
    return main + (f" +{len(names) - 1}" if len(names) > 1 else "")


def _source(step: StepRecord) -> str:
    if not step.runs:
        return "none: the kernels of the operands write into the memory of the result"
    return f"sources/{step.symbol}.ll in the artifact, which is a zip file"


def operations(step: StepRecord, most: int = MOST_OPERATIONS) -> str:
    """Return the names of a kernel's operations in order; consecutive equal names are counted."""
    return operations_of(step.primitives, most)


def operations_of(primitives: str, most: int = MOST_OPERATIONS) -> str:
    """Return the names of the operations in a kernel's primitives, which are given as text."""
    names = [op for _, op, _ in printed_calls(primitives)]
    names = [name for name in names if name != "broadcast"] or names
    if not names:
        return "layout change"
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return cut(" ".join(n if k == 1 else f"{n} x{k}" for n, k in runs), most)


def _others(row: GroupingRecord) -> str:
    count, gone = len(row.kernels), row.instead
    text = "one kernel" if count == 1 else f"{count} kernels"
    return f"{text} instead of " + (f"{len(gone)}" if len(gone) > 1 else "it")


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _cost(step: StepRecord) -> str:
    return time_text(step.cost_ns) if step.is_measured else f"≥{time_text(step.cost_ns)}"


def port_text(port: PortRecord) -> str:
    """Return the value, type, layout and place of a port."""
    return f"%{port.value} {port.type} {port.layout or 'scalar'} ({port.place.lower()})"


def port_bytes(port: PortRecord) -> int:
    """Return the size of a port's value in its layout."""
    return Layout.parse(port.layout).size_bytes(ValueType.parse(port.type))
