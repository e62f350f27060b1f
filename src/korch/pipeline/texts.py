"""The printed forms of the stages' results."""

from collections.abc import Sequence

from korch.binary_program.problem import Plan
from korch.binary_program.text import format_plan, format_problems
from korch.frontend.operator import OperatorGraph
from korch.numerics import Standard
from korch.pipeline.results import Built, Offered, Planned, Programs, Rewritten, SplitModel, StageResults
from korch.primitive.text import parse_graph
from korch.report.kernel import operations_of
from korch.search.instance import Instance
from korch.search.result import Round
from korch.segments.block_task import BlockTask
from korch.segments.join import join
from korch.segments.text import parse_partition
from korch.tile.ir.text import format_program


def operators_text(operators: OperatorGraph) -> str:
    """Return a line for each operator: its label, inputs and outputs."""
    return "".join(f"{o.label}: {', '.join(o.inputs)} -> {', '.join(o.outputs)}\n" for o in operators.operators)


def read_graph_text(results: StageResults, text: str) -> str:
    """Set the result of "fission" or "saturate" from its text; return the name of the next stage.

    Raises:
        InvalidGraphError: a line can't be read.
    """
    if text.startswith("graph("):
        results["fission"] = SplitModel(parse_graph(text))
        return "saturate"
    partition = parse_partition(text)
    results["saturate"] = found = Rewritten(partition, join(partition))
    results["fission"] = SplitModel(found.joined.graph)
    return "reference"


def reference_text(standard: Standard) -> str:
    """Return a line for each output: the error of the model when computed in its own types."""
    rows = standard.given.items()
    return "".join(f"{n}: {e.of_largest:.1e} of the largest element in the model's own types\n" for n, e in rows)


def candidates_text(tasks: Sequence[BlockTask]) -> str:
    """Return the groups of each block, with the kernels that providers offer for them."""
    lines: list[str] = []
    for b, task in enumerate(tasks):
        if len(tasks) > 1:
            lines.append(f"# block {b + 1} of {len(tasks)}")
        offers: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        groups = {}
        for c in task.candidates:
            key = (c.group.primitives, c.group.outputs)
            groups[key] = c.group
            layouts = f"{', '.join(map(str, c.offer.inputs))} -> {', '.join(map(str, c.offer.outputs))}"
            offers.setdefault(key, []).append(f"{c.provider} {c.offer.variant} ({layouts})".replace("  ", " "))
        for number, (key, group) in enumerate(groups.items()):
            lines.append(f"# group {number}: primitives {', '.join(map(str, group.primitives))}")
            lines += [f"#   {offer}" for offer in offers[key]]
            lines.append(group.text)
    return "\n".join(lines) + "\n"


def plan_text(offered: Offered, planned: Planned) -> str:
    """Return the program of each block in its plain layouts, with its costs, and the best plan."""
    found, ledger, tasks = planned.outcome.found, offered.ledger, offered.tasks
    problems = (Instance(task.block.graph, task.candidates).problem(ledger.cost_ns) for task in tasks)
    lines = [format_problems(tuple(problems))]
    if planned.outcome.partition is None and tasks:
        places = {id(c): k for k, c in enumerate(tasks[0].candidates)}
        chosen = tuple(places[id(c)] for c in found.steps if id(c) in places)
        lines.append("\n" + format_plan(Plan(chosen, found.certificate)))
    lines.append("\n")
    for number, candidate in enumerate(planned.best):
        cost_ns, is_measured = ledger.cost_ns(candidate)
        kind = "measured" if is_measured else "bound"
        operations = operations_of(candidate.group.text)
        lines.append(f"# kernel {number}: {candidate.provider}, {cost_ns} ns {kind}: {operations}\n")
    return "".join(lines)


def programs_text(programs: Programs) -> str:
    """Return the tile program of each kernel of the best plan."""
    parts = []
    for number, (candidate, program) in enumerate(programs):
        parts.append(f"# kernel {number} of {candidate.provider}: {operations_of(candidate.group.text)}\n")
        parts.append(f"# {candidate.provider} makes it without a tile program\n" if program is None else "")
        parts.append("" if program is None else format_program(program))
    return "".join(parts)


def kernels_text(built: Built) -> str:
    """Return the sources of the executable's kernels."""
    return "\n".join(f"// {name}\n{text}" for name, text in built.executable.sources.items())


def tasks_line(tasks: Sequence[BlockTask]) -> str:
    """Return a line with the numbers of segments, groups and candidates."""
    groups = sum(task.enumeration.groups for task in tasks)
    text = f"{groups} groups, {sum(len(task.candidates) for task in tasks)} candidates"
    if len(tasks) > 1 or any(task.count > 1 for task in tasks):
        segments = sum(task.count for task in tasks)
        text = f"{segments} segments, {len(tasks)} of them different: {text}"
    return text


def round_line(tasks: Sequence[BlockTask], b: int, entry: Round) -> str:
    """Return a line with the bound, the best plan and the gap after a round of a block's search."""
    text = f"bound {entry.bound_ns / 1e6:.3f} ms, {entry.measured} measured"
    if entry.incumbent_ns is not None:
        gap = 100 * (entry.incumbent_ns - entry.bound_ns) / (entry.incumbent_ns or 1)
        text = f"{text}, best {entry.incumbent_ns / 1e6:.3f} ms, gap {gap:.2f} %"
    if len(tasks) > 1:
        count = f" (x {tasks[b].count})" if tasks[b].count > 1 else ""
        text = f"block {b + 1} of {len(tasks)}{count}: {text}"
    return text
