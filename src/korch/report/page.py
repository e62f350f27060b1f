"""A plan as one HTML page: facts, kernels, graph, roofline, timeline, memory, search.

The page contains its data and works without a network. Its style and scripts are in `web/`;
`web/libraries.js` contains the drawing libraries (Cytoscape.js, dagre, Chart.js, highlight.js),
bundled by `make web`.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from korch.errors import UnsupportedError
from korch.primitive.text import parse_ends, printed_calls
from korch.records import plain
from korch.report.assembly import code_lines
from korch.report.compare import Row
from korch.report.explain import output_rows, rule_rows, summary
from korch.report.kernel import (
    grouping_row,
    groupings_of,
    layer_of,
    operations,
    origins_of,
    port_bytes,
    port_text,
    rival_row,
    slowest,
    why,
)
from korch.report.threads import Threads
from korch.report.units import cut
from korch.runtime.record import PlanRecord, PortRecord
from korch.runtime.report import Report
from korch.runtime.text import counted

SCRIPTS = ("libraries.js", "graph.js", "charts.js", "page.js")

LONGEST_SOURCE = 200_000
"""The limit of a kernel's source on the page, in characters."""

LONGEST_LABEL = 250
"""The limit of a label in the graph, in characters. Labels are shown in several lines."""


def page(data: Mapping[str, Any]) -> str:
    """Return the page of a plan; `data`: the result of `page_data`."""
    script = "".join(map(_web, SCRIPTS))
    text = (files("korch.report") / "page.html").read_text("utf-8")
    # "<" is escaped, because "</script" would end the element.
    packed = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(data["title"]),
        "SUMMARY": html.escape(data["summary"]),
        "STYLE": _web("page.css"),
        "DATA": packed,
        "SCRIPT": script.replace("</script", "<\\/script"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text)


def _web(name: str) -> str:
    path = files("korch.report") / "web" / name
    if not path.is_file():
        raise UnsupportedError(
            f"{name}, which draws the page, is missing",
            where="option --html",
            hint="In a checkout `make web` makes it, with Node.js; wheels made by `make wheel` contain it",
        )
    return path.read_text(encoding="utf-8")


def page_data(
    plan: PlanRecord,
    report: Report,
    sources: Mapping[str, str],
    run_ns: Sequence[float] | None = None,
    peers: Sequence[Row] = (),
    threads: Threads | None = None,
) -> dict[str, Any]:
    """Return the data of a page.

    Args:
        plan: the kernels in order.
        report: how the plan was found.
        sources: the sources of the kernels, by file name or symbol.
        run_ns: the time of each kernel within a run, if the plan was run.
        peers: the rows of a comparison with other engines.
        threads: the activity of its threads in runs, if it was recorded.
    """
    is_cuda = "arch" in plan.target
    name = plan.model.path.rpartition("/")[2] or "a model"
    without_table = replace(report, output_errors=())
    kernels = [_kernel(number, plan, report, run_ns) for number in range(len(plan.steps))]
    for kernel, load in zip(kernels, threads.loads() if threads else (), strict=False):
        kernel["load"] = load and f"{load.longest:.2f} of the mean, {100 * load.idle:.1f} % idle"
    texts = {key: text[:LONGEST_SOURCE] for key, text in sources.items()}
    for symbol in {step.symbol for step in plan.steps if f"{step.symbol}.ll" in sources}:
        texts[symbol] = "\n".join(code_lines(sources, symbol))[:LONGEST_SOURCE]
    return {
        "title": f"{name} on {plan.target.get('cpu', 'an unknown machine')}",
        "summary": summary(name, without_table) if report.plan else "",
        "headline": _headline(plan, report, peers),
        "facts": _facts(plan, report),
        "kernels": kernels,
        "total_us": sum(k["us"] for k in kernels) or 1.0,
        "plans": plain(report.plans),
        "kept": report.plan or "",
        "rules": plain(rule_rows(plan, report)),
        "peers": [_peer(row, peers) for row in peers],
        "sources": {step.symbol: texts.get(step.symbol, "") for step in plan.steps},
        "language": "python" if is_cuda else "x86asm",
        "graphs": {
            "kernels": _kernel_graph(plan),
            "primitives": _primitive_graph(plan),
            "operators": _operator_graph(plan, report),
        },
        "roof": _roof(report),
        "memory": _live_bytes(plan),
        "arena_bytes": plan.arena_bytes,
        **_typical_run(threads),
        "slowest": slowest(plan, report),
        "traces": _search_traces(report),
        "outputs": output_rows(report),
    }


def _typical_run(threads: Threads | None) -> dict[str, Any]:
    if threads is None:
        return {"threads": [], "spans_us": [], "run_note": ""}
    run, count = threads.typical, len(threads.runs)
    return {
        "threads": [[span.kernel, span.thread, span.begin_ns / 1e3, span.end_ns / 1e3] for span in run.spans],
        "spans_us": [t / 1e3 for t in run.kernel_ns],
        "run_note": f"One run of {count}: the one whose kernels are nearest to their medians. "
        "It has a row for each provider of kernels, and one for each thread.",
    }


def _facts(plan: PlanRecord, report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return groups of facts: their title, and a name and a text for each fact."""

    def milliseconds(time_ms: float | None) -> str:
        return "" if time_ms is None else f"{time_ms:.3f} ms"

    time_rows: list[tuple[str, str]] = []
    search = [("kernels", str(plan.kernel_count))]
    if in_place := len(plan.steps) - plan.kernel_count:
        search.append(("concatenations in place", str(in_place)))
    work: list[tuple[str, str]] = []
    if report.is_known:
        rates = report.machine
        time_rows = [
            ("measured, in turn with other plans", milliseconds(report.measured_ms)),
            ("measured, in a process of its own", milliseconds(report.fresh.median_ms if report.fresh else None)),
            ("expected from the kernels' samples", milliseconds(report.expected_ms)),
            ("sum of the kernels' times", milliseconds(report.predicted_ms)),
            ("lower bound of that sum", milliseconds(report.lower_bound_ms)),
            ("calibrated lower bound of that sum", milliseconds(report.calibrated_ms)),
            ("an empty kernel", f"{rates.launch_ns:,.0f} ns" if rates.launch_ns else ""),
            ("an empty parallel region", f"{rates.region_ns:,.0f} ns" if rates.region_ns else ""),
        ]
        search += [
            ("candidate kernels", f"{report.candidates:,}"),
            ("measured", f"{report.measured_candidates:,}"),
            ("do not run", f"{report.failed_candidates:,}" if report.failed_candidates else ""),
            ("gap to the hard bound", "" if report.gap is None else f"{100 * report.gap:.1f} %"),
            (
                "gap to the calibrated bound",
                "" if report.calibrated_gap is None else f"{100 * report.calibrated_gap:.1f} %",
            ),
            ("time to optimize", f"{report.seconds:.1f} s"),
        ]
        work = [
            ("operations in the plan", f"{report.flop / 1e9:.2f} GFLOP"),
            ("operations of the model as given", f"{report.given_flop / 1e9:.2f} GFLOP"),
            ("error / largest element", f"{report.max_error:.1e}"),
            ("the same of the model as given", f"{report.given_error:.1e}"),
        ]
    work += [
        ("memory for intermediate values", f"{plan.arena_bytes / 2**20:.1f} MiB"),
        ("lower bound of that memory", f"{plan.arena_bound_bytes / 2**20:.1f} MiB"),
        ("memory for weights", f"{plan.weights_bytes / 2**20:.1f} MiB"),
    ]
    groups = (("Time of a run", time_rows), ("Search", search), ("Work, memory, accuracy", work))
    return [(title, [row for row in rows if row[1]]) for title, rows in groups if rows]


def _headline(plan: PlanRecord, report: Report, peers: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the most important numbers, each with its meaning."""
    found = []
    threads = counted(plan.threads, "thread")
    if times := report.times:
        disturbed = ", disturbed by other processes" * times.is_disturbed
        spread = f"{times.p10_ms:.3g} to {times.p90_ms:.3g}"
        found.append((f"{times.median_ms:.3g} ms", f"a run, measured ({spread}{disturbed}); {threads}"))
    elif report.is_known:
        found.append((f"{report.predicted_ms:.3g} ms", f"the sum of the kernels, not measured; {threads}"))
    for row in peers:
        if row.name.startswith("onnxruntime"):
            ratio = float(_peer(row, peers)["ratio"])
            found.append((f"{ratio:.2f}×", "as fast as ONNX Runtime"))
    if report.gap is not None:
        found.append((f"{100 * report.gap:.0f} %", "gap between the sum of the kernels' times and its lower bound"))
    return found


def _kernel(number: int, plan: PlanRecord, report: Report, run_ns: Sequence[float] | None) -> dict[str, Any]:
    step = plan.steps[number]
    origins, rules = origins_of(step)
    return {
        "number": number,
        "symbol": step.symbol,
        "provider": step.provider,
        "variant": step.variant,
        "operations": operations(step),
        "layer": layer_of(step),
        "is_float": any(port.type.startswith(("f", "bf")) for port in step.inputs if port.place != "CONSTANT"),
        "primitives": step.primitives,
        "origins": origins,
        "rules": rules,
        "inputs": [port_text(port) for port in step.inputs],
        "outputs": [port_text(port) for port in step.outputs],
        "us": step.cost_ns / 1e3,
        "measured": step.is_measured,
        "bound_us": step.bound_ns / 1e3,
        "why": why(step, report.machine),
        "bytes": step.size_bytes,
        "flop": step.work_flop,
        "run_us": None if run_ns is None else run_ns[number] / 1e3,
        "rivals": [plain(rival_row(row, step, plan, report)) for row in report.rivals.get(step.candidate, ())],
        "groupings": [plain(grouping_row(row, plan, report)) for row in groupings_of(number, report)],
        "described": "\n".join(report.described.get(step.candidate, ())),
    }


def _peer(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    own = next((r for r in rows if r.name.startswith("korch")), rows[0])
    times = sorted(t / 1e6 for t in row.times_ns) or [float("nan")]
    of = sorted(t / 1e6 for t in own.times_ns) or times

    def at(share: float) -> float:
        return times[min(len(times) - 1, int(share * len(times)))]

    return {
        "name": row.name,
        "median_ms": at(0.5),
        "spread": f"{at(0.1):.3f}–{at(0.9):.3f} ms",
        "ratio": f"{at(0.5) / of[len(of) // 2]:.2f}",
    }


# Graphs: nodes with the kernels that they belong to, and edges


def _writers(plan: PlanRecord) -> list[dict[tuple[int, str], int]]:
    """Return, per step, the step that last wrote each port before it."""
    found: list[dict[tuple[int, str], int]] = []
    current: dict[tuple[int, str], int] = {}
    for number, step in enumerate(plan.steps):
        found.append(dict(current))
        for port in step.outputs:
            current[port.value, port.layout] = number
    return found


def _source(writers: Mapping[tuple[int, str], int], port: PortRecord) -> int | None:
    """Return the last step that wrote a port's value, in the port's layout if there is one."""
    exact = writers.get((port.value, port.layout))
    if exact is not None:
        return exact
    return max((n for (value, _), n in writers.items() if value == port.value), default=None)


def _kernel_graph(plan: PlanRecord) -> dict[str, Any]:
    writers = _writers(plan)
    nodes = [
        {"id": f"k{n}", "label": f"{n} {layer_of(step) or operations(step, LONGEST_LABEL)}", "kernels": [n]}
        for n, step in enumerate(plan.steps)
    ]
    edges = {
        (f"k{before}", f"k{n}")
        for n, step in enumerate(plan.steps)
        for port in step.inputs
        if (before := _source(writers[n], port)) is not None
    }
    return {"nodes": nodes, "edges": sorted(edges)}


def _primitive_graph(plan: PlanRecord) -> dict[str, Any]:
    """Return the primitives, each within the box of its kernel."""
    writers = _writers(plan)
    nodes: list[dict[str, Any]] = []
    edges: set[tuple[str, str]] = set()
    made: dict[tuple[int, int], str] = {}  # (step, value) -> the node that computes it
    for n, step in enumerate(plan.steps):
        box = f"k{n}"
        nodes.append({"id": box, "label": f"{n} {step.provider}", "kernels": [n]})
        ends = parse_ends(next(line for line in step.primitives.splitlines() if not line.startswith("#")))
        inputs = {value: int(name[1:]) for name, value, _ in ends[0]}
        outputs = {value: int(name[1:]) for name, value in ends[1]}
        calls = printed_calls(step.primitives)
        local = {value for value, _, _ in calls}
        for value, op, arguments in calls:
            node = f"{box}%{value}"
            nodes.append({"id": node, "parent": box, "label": op, "kernels": [n]})
            for argument in arguments:
                if argument in local:
                    edges.add((f"{box}%{argument}", node))
                elif inputs.get(argument, len(step.inputs)) < len(step.inputs):
                    port = step.inputs[inputs[argument]]
                    if (before := _source(writers[n], port)) is not None:
                        edges.add((made.get((before, port.value), f"k{before}"), node))
            if outputs.get(value, len(step.outputs)) < len(step.outputs):
                made[n, step.outputs[outputs[value]].value] = node
    known = {node["id"] for node in nodes}
    return {"nodes": nodes, "edges": sorted(e for e in edges if set(e) <= known)}


def _operator_graph(plan: PlanRecord, report: Report) -> dict[str, Any]:
    """Return the model's operators with the kernels that run some part of each."""
    users: dict[str, list[int]] = {}
    for n, step in enumerate(plan.steps):
        for origin in step.origins:
            users.setdefault(origin, []).append(n)
    nodes: list[dict[str, Any]] = []
    edges: set[tuple[str, str]] = set()
    made: dict[str, str] = {}
    for i, operator in enumerate(report.operators):
        label = operator.label
        nodes.append({"id": f"o{i}", "label": cut(label, LONGEST_LABEL), "kernels": users.get(label, [])})
        edges |= {(made[name], f"o{i}") for name in operator.inputs if name in made}
        made |= dict.fromkeys(filter(None, operator.outputs), f"o{i}")
    return {"nodes": nodes, "edges": sorted(edges)}


# Charts


def _search_traces(report: Report) -> list[dict[str, Any]]:
    """Return searches over time: the whole model's first, then each block's in each interface."""
    note = "an earlier run did this search; the seconds are its own" if report.recalled else ""
    if report.partition is not None:
        note = "a candidate that blocks share is counted for each of them"
    found = [{"name": "the whole model", "note": note, "rounds": plain(report.rounds)}]
    for number, block in enumerate(report.partition.blocks if report.partition else ()):
        for search in block.searches:
            begun = "recalled from an earlier run" if search.is_recalled else "begun"
            layouts = cut(block.layouts[search.interface], 60)
            found.append(
                {
                    "name": f"block {number + 1} (x {len(block.instances)}), {search.what}: {layouts}",
                    "note": f"{begun} {search.began_s:.1f} s after the search of the model began",
                    "rounds": plain(search.rounds),
                }
            )
    return [trace for trace in found if trace["rounds"]]


def _roof(report: Report) -> list[tuple[float, float]]:
    """Return the roofline as points (FLOP per byte, GFLOP/s); empty if it was not measured."""
    machine = report.machine
    rate = machine.copy_bytes_per_s
    if machine.levels:
        rate = machine.levels[-1].read_bytes_per_s + machine.levels[-1].write_bytes_per_s
    peak, rate = (found / 1e9 / machine.margin for found in (machine.rate_flop_per_s, rate))
    if not peak or not rate:
        return []
    knee = peak / rate
    return [(knee / 1000, peak / 1000), (knee, peak), (knee * 1000, peak)]


def _live_bytes(plan: PlanRecord) -> list[int]:
    """Return, for each kernel, the bytes of the arena that are in use while it runs.

    A buffer that is written in parts is in use from the step that writes its first part.
    """
    last: dict[int, int] = {}
    born: list[tuple[int, int, int]] = []  # offset, first step, bytes
    spans: list[tuple[int, int, int]] = []
    open_at: dict[int, int] = {}
    for n, step in enumerate(plan.steps):
        for port in step.inputs:
            if port.place == "ARENA" and port.at in open_at:
                last[open_at[port.at]] = n
        for port in step.outputs:
            if port.place == "ARENA":
                first = n
                for part in () if step.runs else step.inputs:
                    first = min(first, born[open_at[part.at]][1])
                    born[open_at[part.at]] = (part.at, n, 0)
                    open_at[part.at] = len(born)
                open_at[port.at] = len(born)
                born.append((port.at, first, port_bytes(port)))
                last[len(born) - 1] = n
    for i, (_, first, size) in enumerate(born):
        spans.append((first, last[i], size))
    return [
        step.workspace_bytes + sum(size for first, end, size in spans if first <= n <= end)
        for n, step in enumerate(plan.steps)
    ]
