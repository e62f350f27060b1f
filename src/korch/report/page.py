"""A plan as one page of HTML: facts, kernels, graph, roofline, timeline, memory, search.

The page holds all that it shows and works from a file, without a network. Its style and script are
`web/page.css` and `web/page.js`; `web/libraries.js` holds the libraries that draw (Cytoscape.js,
dagre, Chart.js, highlight.js), bundled by `make web`.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from korch.candidate.layout import Layout
from korch.equivalence.rule import rule_of
from korch.errors import UnsupportedError
from korch.primitive.types import ValueType
from korch.report.explain import output_rows, rule_rows, summary
from korch.report.kernel import grouping_row, groupings_of, operations, rival_row, slowest, why
from korch.report.threads import Threads
from korch.report.units import cut
from korch.runtime.record import PlanRecord, PortRecord

SCRIPTS = ("libraries.js", "graph.js", "charts.js", "page.js")

LONGEST_SOURCE = 200_000
"""Characters of a kernel's source that the page holds."""

LONGEST_LABEL = 250
"""Characters of a label in the graph: it is shown whole, in lines, but for absurd ones."""

_PRIMITIVE = re.compile(r"^(%\d+): (\S+) = (\w+)\(([^)]*)\)", re.MULTILINE)
_ENDS = re.compile(r'(%\d+) "(\w+)"')


def page(
    plan: PlanRecord,
    report: Mapping[str, Any],
    sources: Mapping[str, str],
    run_ns: Sequence[float] | None = None,
    peers: Sequence[Mapping[str, Any]] = (),
    threads: Threads | None = None,
) -> str:
    """Return the page.

    Args:
        plan: the kernels in order.
        report: how the plan was found.
        sources: of the kernels, by file name or symbol.
        run_ns: what each kernel takes inside of a run, if it was run.
        peers: rows of a comparison, as `korch bench --json` prints them.
        threads: what its threads do in runs, if somebody looked.

    """
    data = page_data(plan, report, sources, run_ns, peers, threads)
    script = "".join(map(_web, SCRIPTS))
    text = (files("korch.report") / "page.html").read_text()
    # What would end the element early is written in another way that means the same.
    packed = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(data["title"]),
        "SUMMARY": html.escape(data["summary"]),
        "STYLE": style_of_page(),
        "DATA": packed,
        "SCRIPT": script.replace("</script", "<\\/script"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text)


def style_of_page() -> str:
    """Return the style sheet of pages."""
    return _web("page.css")


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
    report: Mapping[str, Any],
    sources: Mapping[str, str],
    run_ns: Sequence[float] | None = None,
    peers: Sequence[Mapping[str, Any]] = (),
    threads: Threads | None = None,
) -> dict[str, Any]:
    """Return what the page's script reads; for the arguments see `page`."""
    is_cuda = "arch" in plan.target
    name = plan.model.path.rpartition("/")[2] or "a model"
    told = {key: value for key, value in report.items() if key != "output_errors"}  # has a table
    kernels = [_kernel(number, plan, report, run_ns) for number in range(len(plan.steps))]
    for kernel, load in zip(kernels, threads.loads() if threads else (), strict=False):
        kernel["load"] = load and f"{load.longest:.2f} of the mean, {100 * load.idle:.1f} % idle"
    texts = {key.removesuffix(".cpp"): text[:LONGEST_SOURCE] for key, text in sources.items()}
    return {
        "title": f"{name} on {plan.target.get('cpu', 'an unknown machine')}",
        "summary": summary({"artifact": name, **told}) if "plan" in report else "",
        "headline": _headline(plan, report, peers),
        "facts": _facts(plan, report),
        "kernels": kernels,
        "total_us": sum(k["us"] for k in kernels) or 1.0,
        "contest": list(report.get("contest", ())),
        "kept": report.get("plan", ""),
        "rules": rule_rows(plan, report),
        "peers": [_peer(row, peers) for row in peers],
        "sources": {step.symbol: texts.get(step.symbol, "") for step in plan.steps},
        "language": "python" if is_cuda else "cpp",
        "graphs": {
            "kernels": _kernel_graph(plan),
            "primitives": _primitive_graph(plan),
            "operators": _operator_graph(plan, report),
        },
        "roof": _roof(plan, report),
        "memory": _live_bytes(plan),
        "arena_bytes": plan.arena_bytes,
        "threads": []
        if threads is None
        else [[span.kernel, span.thread, span.begin_ns / 1e3, span.end_ns / 1e3] for span in threads.typical.spans],
        "spans_us": [] if threads is None else [t / 1e3 for t in threads.typical.kernel_ns],
        "run_note": ""
        if threads is None
        else (
            f"One run of {len(threads.runs)}: the one whose kernels are nearest to their medians. "
            "A row for each maker of kernels, and one for each thread."
        ),
        "slowest": slowest(plan, report),
        "stories": _stories(report),
        "outputs": output_rows(report),
    }


_FACTS = {
    "Time of a run": (
        ("measured", "measured_ms", "{:.3f} ms", 1.0),
        ("expected from the kernels' samples", "expected_ms", "{:.3f} ms", 1.0),
        ("sum of the kernels' times", "predicted_ms", "{:.3f} ms", 1.0),
        ("lower bound of that sum", "lower_bound_ms", "{:.3f} ms", 1.0),
    ),
    "Search": (
        ("candidate kernels", "candidates", "{:,.0f}", 1.0),
        ("measured", "measured_candidates", "{:,.0f}", 1.0),
        ("gap", "gap", "{:.1f} %", 100.0),
        ("time to optimize", "seconds", "{:.1f} s", 1.0),
    ),
    "Work, memory, accuracy": (
        ("operations in the plan", "flop", "{:.2f} GFLOP", 1e-9),
        ("operations of the model as given", "given_flop", "{:.2f} GFLOP", 1e-9),
        ("error / largest element", "max_error", "{:.1e}", 1.0),
        ("the same of the model as given", "given_error", "{:.1e}", 1.0),
    ),
}
"""Groups of facts: name, key of the report, format, factor."""


def _facts(plan: PlanRecord, report: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    groups = {
        title: [
            (name, text.format(scale * report[key])) for name, key, text, scale in rows if report.get(key) is not None
        ]
        for title, rows in _FACTS.items()
    }
    plain = [("kernels", str(plan.kernel_count))]
    if in_place := len(plan.steps) - plan.kernel_count:
        plain.append(("concatenations in place", str(in_place)))
    groups["Search"][:0] = plain
    groups["Work, memory, accuracy"] += [
        ("memory for intermediate values", f"{plan.arena_bytes / 2**20:.1f} MiB"),
        ("memory for weights", f"{plan.weights_bytes / 2**20:.1f} MiB"),
    ]
    return [(title, rows) for title, rows in groups.items() if rows]


def _headline(plan: PlanRecord, report: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the numbers that a reader wants first, each with what it means."""
    found = []
    threads = f"{plan.threads} thread" + "s" * (plan.threads > 1)
    if report.get("measured_ms") is not None:
        found.append((f"{report['measured_ms']:.3g} ms", f"a run, measured; {threads}"))
    elif report.get("predicted_ms") is not None:
        found.append((f"{report['predicted_ms']:.3g} ms", f"a run, predicted; {threads}"))
    for row in peers:
        if str(row.get("name", "")).startswith("onnxruntime"):
            ratio = float(_peer(row, peers)["ratio"])
            found.append((f"{ratio:.2f}×", "as fast as ONNX Runtime"))
    if report.get("gap") is not None:
        found.append((f"{100 * report['gap']:.0f} %", "gap: the most that a longer search could still save"))
    return found


def _kernel(number: int, plan: PlanRecord, report: Mapping[str, Any], run_ns: Sequence[float] | None) -> dict[str, Any]:
    step = plan.steps[number]
    rivals = report.get("rivals", {}).get(step.candidate, ())
    return {
        "number": number,
        "symbol": step.symbol,
        "provider": step.provider,
        "variant": step.variant,
        "operations": operations(step),
        "primitives": step.primitives,
        "origins": [o for o in step.origins if o and not rule_of(o)],
        "rules": sorted({rule for o in step.origins if (rule := rule_of(o))}),
        "inputs": [_port(port) for port in step.inputs],
        "outputs": [_port(port) for port in step.outputs],
        "us": step.cost_ns / 1e3,
        "measured": step.is_measured,
        "bound_us": step.bound_ns / 1e3,
        "why": why(step, report.get("machine", {})),
        "bytes": step.size_bytes,
        "flop": step.work_flop,
        "run_us": None if run_ns is None else run_ns[number] / 1e3,
        "rivals": [rival_row(row, step, plan, report) for row in rivals],
        "groupings": [grouping_row(row, plan, report) for row in groupings_of(number, report)],
    }


def _port(port: PortRecord) -> str:
    return f"%{port.value} {port.type} {port.layout or 'scalar'} ({port.place.lower()})"


def _peer(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = next((r for r in rows if str(r.get("name", "")).startswith("korch")), rows[0])
    times = sorted(float(t) / 1e6 for t in row.get("times_ns", ())) or [float("nan")]
    of = sorted(float(t) / 1e6 for t in own.get("times_ns", ())) or times

    def at(share: float) -> float:
        return times[min(len(times) - 1, int(share * len(times)))]

    return {
        "name": str(row.get("name", "")),
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
    """Return the step that wrote a port; one that is equal under another name, if it must be."""
    exact = writers.get((port.value, port.layout))
    if exact is not None:
        return exact
    return max((n for (value, _), n in writers.items() if value == port.value), default=None)


def _kernel_graph(plan: PlanRecord) -> dict[str, Any]:
    writers = _writers(plan)
    nodes = [
        {"id": f"k{n}", "label": f"{n} {operations(step, LONGEST_LABEL)}", "kernels": [n]}
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
    """Return primitives, each in the box of its kernel."""
    writers = _writers(plan)
    nodes: list[dict[str, Any]] = []
    edges: set[tuple[str, str]] = set()
    made: dict[tuple[int, int], str] = {}  # (step, value) -> the node that computes it
    for n, step in enumerate(plan.steps):
        box = f"k{n}"
        nodes.append({"id": box, "label": f"{n} {step.provider}", "kernels": [n]})
        head = step.primitives.partition("->")
        inputs = {v: int(name[1:]) for v, name in _ENDS.findall(head[0])}
        outputs = {v: int(name[1:]) for v, name in _ENDS.findall(head[2].partition("\n")[0])}
        own = {match[1] for match in _PRIMITIVE.finditer(step.primitives)}
        for match in _PRIMITIVE.finditer(step.primitives):
            value, _, op, arguments = match.groups()
            if op == "constant":
                continue
            node = f"{box}{value}"
            nodes.append({"id": node, "parent": box, "label": op, "kernels": [n]})
            for argument in re.findall(r"%\d+", arguments):
                before = None
                if argument in own:
                    edges.add((f"{box}{argument}", node))
                elif argument in inputs and inputs[argument] < len(step.inputs):
                    port = step.inputs[inputs[argument]]
                    before = _source(writers[n], port)
                    if before is not None:
                        edges.add((made.get((before, port.value), f"k{before}"), node))
            if value in outputs and outputs[value] < len(step.outputs):
                made[n, step.outputs[outputs[value]].value] = node
    known = {node["id"] for node in nodes}
    return {"nodes": nodes, "edges": sorted(e for e in edges if set(e) <= known)}


def _operator_graph(plan: PlanRecord, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's operators with the kernels that run some part of each."""
    users: dict[str, list[int]] = {}
    for n, step in enumerate(plan.steps):
        for origin in step.origins:
            users.setdefault(origin, []).append(n)
    nodes: list[dict[str, Any]] = []
    edges: set[tuple[str, str]] = set()
    made: dict[str, str] = {}
    for i, (label, inputs, outputs) in enumerate(report.get("operators", ())):
        nodes.append({"id": f"o{i}", "label": cut(label, LONGEST_LABEL), "kernels": users.get(label, [])})
        edges |= {(made[name], f"o{i}") for name in inputs if name in made}
        made |= dict.fromkeys(filter(None, outputs), f"o{i}")
    return {"nodes": nodes, "edges": sorted(edges)}


# Charts


def _stories(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return searches over time: the whole model's first, then each block's in each interface."""
    is_old = report.get("recalled")
    note = "an earlier run did this search; the seconds are its own" if is_old else ""
    if report.get("partition"):
        note = "a candidate that blocks share is counted for each of them"
    found = [{"name": "the whole model", "note": note, "rounds": list(report.get("rounds", ()))}]
    for number, block in enumerate((report.get("partition") or {}).get("blocks", ())):
        count = len(block["instances"])
        for search in block.get("searches", ()):
            begun = "recalled from an earlier run" if search["recalled"] else "begun"
            found.append(
                {
                    "name": f"block {number + 1} (x {count}), {search['what']}: {cut(search['layouts'], 60)}",
                    "note": f"{begun} {search['began_s']:.1f} s after the search of the model began",
                    "rounds": search["rounds"],
                }
            )
    return [story for story in found if story["rounds"]]


def _roof(plan: PlanRecord, report: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return the roofline as points (FLOP per byte, GFLOP/s); empty if it was not measured."""
    machine = report.get("machine", {})
    levels = machine.get("levels", ())
    peak = machine.get("rate_flop_per_s", 0.0) / 1e9
    rate = machine.get("copy_bytes_per_s", 0.0) / 1e9
    if levels:
        rate = (levels[-1]["read_bytes_per_s"] + levels[-1]["write_bytes_per_s"]) / 1e9
    peak, rate = (found / machine.get("margin", 1.0) for found in (peak, rate))
    if not peak or not rate:
        return []
    knee = peak / rate
    return [(knee / 1000, peak / 1000), (knee, peak), (knee * 1000, peak)]


def _live_bytes(plan: PlanRecord) -> list[int]:
    """Return the bytes of the arena that are in use while each kernel runs.

    What is a part of another buffer is in use as that is, from its first part on.
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
                born.append((port.at, first, _bytes_of(port)))
                last[len(born) - 1] = n
    for i, (_, first, size) in enumerate(born):
        spans.append((first, last[i], size))
    return [
        step.workspace_bytes + sum(size for first, end, size in spans if first <= n <= end)
        for n, step in enumerate(plan.steps)
    ]


def _bytes_of(port: PortRecord) -> int:
    return Layout.parse(port.layout).size_bytes(ValueType.parse(port.type))
