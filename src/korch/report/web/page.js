// The page of one plan: facts, kernels, graph, roofline, timeline, memory, search. All data are in
// the page itself; the table of kernels says in words what the graph and the charts show.
const { Chart, cytoscape, highlighter } = korchLibraries;
const data = JSON.parse(document.getElementById("data").textContent);
const kernels = data.kernels;
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const READABLE = 0.8; // the least zoom at which labels can be read
let selected = -1;
let view = "kernels";
let graph = null;
const charts = [];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const time = (us) => us >= 1000 ? `${(us / 1000).toFixed(2)} ms` : `${us.toFixed(us < 10 ? 2 : 1)} µs`;
function count(n) {
  const units = ["", "K", "M", "G", "T"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
  return `${n >= 100 || i === 0 ? Math.round(n) : n.toFixed(1)}${units[i]}`;
}
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  while (bytes >= 1024 && i < units.length - 1) { bytes /= 1024; i += 1; }
  return `${i ? bytes.toFixed(1) : bytes} ${units[i]}`;
}
const ratio = (k) => k.measured && k.bound_us > 0 ? k.us / k.bound_us : null;

// Facts

function facts() {
  byId("facts").append(...data.facts.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  byId("first").hidden = !data.slowest.length;
  byId("slowest").append(...data.slowest.map(([number, text]) => element("li", {},
    element("button", { class: "link", onclick: () => show(number) }, `Kernel ${number}`), ` ${text}`)));
  for (const [i, story] of data.stories.entries()) {
    byId("story").append(element("option", { value: i }, story.name));
  }
  byId("contest").hidden = !data.contest.length;
  byId("rules").hidden = !data.rules.length;
  if (data.contest.length) {
    byId("contest").append(table(
      ["plan", "kernels", "predicted", "median", "10–90 %", "error", "outcome"],
      data.contest.map((row) => [
        row.plan, row.kernels,
        `${row.is_measured === false ? "≥ " : ""}${row.predicted_ms.toFixed(3)} ms`,
        row.measured_ms === null ? "–" : `${row.measured_ms.toFixed(3)} ms`,
        row.measured_ms === null ? "–" : `${row.p10_ms.toFixed(3)}–${row.p90_ms.toFixed(3)} ms`,
        row.max_error === null ? "–" : row.max_error.toExponential(1),
        row.plan === data.kept ? "kept" : row.refusal || "slower",
      ])));
  }
  if (data.rules.length) {
    byId("rules").append(table(["rule", "alternatives added", "kernels that use it", "saves"],
      data.rules.map((rule) => [rule.name, rule.fired, rule.kernels, rule.saves])));
  }
  byId("outputs").hidden = byId("outputs-title").hidden = !data.outputs.length;
  if (data.outputs.length) {
    byId("outputs").append(table(["output", "largest error / largest element",
      "largest error / RMS", "RMS of the errors / RMS", "the model as given: largest / largest"], data.outputs));
  }
  byId("peers").hidden = byId("peers-title").hidden = !data.peers.length;
  if (data.peers.length) {
    byId("peers").append(table(["engine", "median", "10–90 %", "times Korch's"],
      data.peers.map((p) => [p.name, `${p.median_ms.toFixed(3)} ms`, p.spread, p.ratio])));
  }
}

function table(head, rows, isText = false) {
  const isNumber = (text) => !isText && /^[+−–≥\d.]/.test(String(text));
  const right = head.map((_, i) => rows.length > 0 && rows.every((row) => isNumber(row[i])));
  const side = (i) => right[i] ? "number" : null;
  return element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text, i) =>
      element("th", { scope: "col", class: side(i) }, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, i) =>
      element("td", { class: side(i) }, String(cell)))))));
}

// The table of kernels

const columns = [
  ["#", (k) => k.number, (k) => k.number],
  ["cost", (k) => k.us, (k) => (k.measured ? "" : "≥ ") + time(k.us)],
  ["share", (k) => k.us, (k) => `${(100 * k.us / data.total_us).toFixed(1)} %`],
  ["× bound", (k) => ratio(k) ?? 0, (k) => ratio(k) === null ? "–" : ratio(k).toFixed(1)],
  ["in a run", (k) => k.run_us ?? 0, (k) => k.run_us === null ? "–" : time(k.run_us)],
  ["bytes", (k) => k.bytes, (k) => size(k.bytes)],
  ["FLOP", (k) => k.flop, (k) => count(k.flop)],
  ["provider", (k) => k.provider, (k) => k.provider],
  ["computes", (k) => k.operations, (k) => k.operations],
];
let order = { column: 1, up: false };

function list() {
  const needle = byId("search").value.trim().toLowerCase();
  const [, key] = columns[order.column];
  const rows = kernels.filter((k) => matches(k, needle)).sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    const sign = x < y ? -1 : x > y ? 1 : a.number - b.number;
    return order.up ? sign : -sign;
  });
  const head = element("tr", {}, ...columns.map(([name], i) => element("th", {
    scope: "col", class: i < 7 ? "number" : null,
    "aria-sort": i === order.column ? (order.up ? "ascending" : "descending") : "none",
  }, element("button", { onclick: () => { order = { column: i, up: i === order.column ? !order.up : i >= 7 }; list(); } }, name))));
  const body = rows.map((k) => element("tr", {
    class: "kernel", tabindex: -1, "data-kernel": k.number, "aria-selected": k.number === selected,
    onclick: () => select(k.number),
    onkeydown: (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(k.number); }
      const row = event.currentTarget;
      const other = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling,
        Home: row.parentElement.firstElementChild, End: row.parentElement.lastElementChild }[event.key];
      if (other) { event.preventDefault(); stop(other); other.focus(); }
    },
  }, ...columns.map(([, , show], i) => element("td", { class: i < 7 ? "number" : null }, String(show(k))))));
  byId("kernels").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  stop(body.find((row) => Number(row.dataset.kernel) === selected) ?? body[0]);
  byId("found").textContent = needle ? `${rows.length} of ${kernels.length} kernels` : `${kernels.length} kernels`;
  if (graph) highlight(new Set(rows.map((k) => k.number)), needle !== "");
}

// One row is a stop of the Tab key; arrows move it.
function stop(row) {
  for (const other of document.querySelectorAll("tr.kernel[tabindex='0']")) other.tabIndex = -1;
  if (row) row.tabIndex = 0;
}

function matches(k, needle) {
  if (!needle) return true;
  return [k.operations, k.provider, k.symbol, k.origins.join(" "), `#${k.number}`]
    .some((text) => text.toLowerCase().includes(needle));
}

// The details of one kernel

function show(number) {
  select(number);
  byId("details-title").focus();
  byId("details").scrollIntoView({ block: "nearest" });
}

function back() {
  const row = document.querySelector(`tr.kernel[data-kernel="${selected}"]`);
  row?.focus();
}

function select(number) {
  selected = number;
  const k = kernels[number];
  for (const row of document.querySelectorAll("tr.kernel")) {
    const is = Number(row.dataset.kernel) === number;
    row.setAttribute("aria-selected", is);
    if (is) stop(row);
  }
  byId("status").textContent = `Kernel ${number}: ${k.operations}, ${k.why}`;
  const rivals = k.rivals.map((r) => [r.what, r.cost, r.more]);
  const groupings = k.groupings.map((g) => element("li", {},
    element("b", {}, g.more), ` ${g.cost}: `, g.what, element("span", { class: "faint" }, ` instead of ${g.instead}`)));
  byId("details").replaceChildren(
    element("h2", { id: "details-title", tabindex: -1 }, `Kernel ${k.number}`),
    element("p", {}, k.operations),
    table(["", ""], [
      ["made by", `${k.provider}${k.variant ? `, ${k.variant}` : ""}`],
      ["cost", `${k.measured ? time(k.us) : `at least ${time(k.us)}, not measured`}`],
      ["why", k.why],
      ["bound", `${time(k.bound_us)}${ratio(k) ? `: it takes ${ratio(k).toFixed(1)} times as long` : ""}`],
      ["in a run", k.run_us === null ? "not run" : time(k.run_us)],
      ...(k.load ? [["threads", `the one that works longest: ${k.load}`]] : []),
      ["reads", k.inputs.join("; ") || "nothing"], ["writes", k.outputs.join("; ")],
      ["moves", `${size(k.bytes)}, ${k.us ? (k.bytes / k.us / 1e3).toFixed(1) : "–"} GB/s`],
      ["computes", `${count(k.flop)}FLOP, ${k.us ? (k.flop / k.us / 1e3).toFixed(1) : "–"} GFLOP/s`],
      ["from", k.origins.join(", ") || (k.rules.length ? "what rules wrote" : "a change of layout")],
      ["rules", k.rules.join(", ") || "none"],
    ], true),
    element("h3", {}, "Other ways to run the same"),
    rivals.length ? table(["candidate", "cost", "takes more"], rivals)
      : element("p", { class: "faint" }, "There is no other candidate for exactly these primitives."),
    element("h3", {}, "Other groupings of the same work"),
    groupings.length ? element("ul", { class: "groupings" }, ...groupings)
      : element("p", { class: "faint" }, "None was measured."),
    element("h3", {}, "Primitives"), element("pre", { tabindex: 0 }, k.primitives),
    element("h3", {}, "Source"), source(k),
  );
  if (graph) {
    graph.elements().unselect();
    const nodes = graph.nodes().filter((n) => (n.data("kernels") ?? []).includes(number));
    nodes.select();
    if (nodes.length) graph.zoom(Math.max(graph.zoom(), READABLE)).center(nodes);
  }
}

function source(k) {
  const text = data.sources[k.symbol] ?? "";
  if (!text) return element("p", { class: "faint" }, "The source is not in the artifact.");
  const code = element("code");
  code.innerHTML = highlighter.highlight(text, { language: data.language }).value;
  return element("pre", { tabindex: 0 }, code);
}

// The graph

function draw() {
  const chosen = data.graphs[view];
  const most = Math.max(...kernels.map((k) => k.us), 1e-9);
  const places = view === "primitives" ? placed(chosen) : null;
  const nodes = chosen.nodes.map((n) => ({ data: { ...n }, position: places?.get(n.id) }));
  const edges = chosen.edges.map(([source, target], i) => ({ data: { id: `e${i}`, source, target } }));
  if (graph) graph.destroy();
  graph = cytoscape({
    container: byId("graph"), elements: [...nodes, ...edges],
    textureOnViewport: nodes.length > 300, hideEdgesOnViewport: nodes.length > 600,
    layout: places ? { name: "preset" } : { ...DAGRE },
    style: [
      { selector: "node", style: {
        label: "data(label)", shape: "round-rectangle", width: (n) => width(n.data("label")), height: 24,
        "font-size": 11, "text-valign": "center", color: color("--ink"),
        "background-color": (n) => shade(n, most), "border-width": 1, "border-color": color("--line"),
      } },
      { selector: "node:parent", style: { "text-valign": "top", "background-opacity": 0.25 } },
      { selector: "node:selected", style: { "border-width": 3, "border-color": color("--accent") } },
      { selector: ".out", style: { opacity: 0.15 } },
      { selector: "edge", style: {
        width: 1.2, "line-color": color("--faint"), "target-arrow-color": color("--faint"),
        "target-arrow-shape": "triangle", "arrow-scale": 0.7, "curve-style": "bezier",
      } },
    ],
  });
  graph.on("tap", "node", (event) => {
    const of = event.target.data("kernels") ?? [];
    if (of.length) select(of.includes(selected) ? of[(of.indexOf(selected) + 1) % of.length] : of[0]);
  });
}

const DAGRE = { name: "dagre", rankDir: "TB", nodeSep: 14, rankSep: 34, animate: false };
const width = (label) => 16 + 6 * label.length;

// Where primitives stand: dagre places the boxes of kernels, which are few; inside of each box a
// primitive stands below all that it reads. Dagre with boxes in boxes takes seconds for hundreds.
function placed(chosen) {
  const inside = chosen.nodes.filter((n) => n.parent);
  const parent = new Map(inside.map((n) => [n.id, n.parent]));
  const box = (id) => parent.get(id) ?? id;
  const depth = new Map(inside.map((n) => [n.id, 0]));
  const own = chosen.edges.filter(([a, b]) => parent.has(a) && parent.get(a) === parent.get(b));
  for (let changed = true, turns = 0; changed && turns <= inside.length; turns += 1) {
    changed = false;
    for (const [a, b] of own) {
      if (depth.get(b) <= depth.get(a)) { depth.set(b, depth.get(a) + 1); changed = true; }
    }
  }
  const rows = new Map(); // box -> depth -> nodes
  for (const n of inside) {
    const of = rows.get(n.parent) ?? rows.set(n.parent, []).get(n.parent);
    (of[depth.get(n.id)] ??= []).push(n);
  }
  const long = (row) => row.reduce((sum, n) => sum + width(n.label) + 14, 0);
  const boxes = chosen.nodes.filter((n) => !n.parent).map((n) => {
    const of = rows.get(n.id) ?? [];
    return { data: { id: n.id, w: Math.max(width(n.label), ...of.map(long)) + 20, h: 46 * Math.max(1, of.length) + 24 } };
  });
  const between = new Set(chosen.edges.map(([a, b]) => `${box(a)} ${box(b)}`).filter((text) => {
    const [a, b] = text.split(" ");
    return a !== b;
  }));
  const edges = [...between].map((text) => ({ data: { source: text.split(" ")[0], target: text.split(" ")[1] } }));
  const outer = cytoscape({
    headless: true, styleEnabled: true, elements: [...boxes, ...edges], layout: { ...DAGRE },
    style: [{ selector: "node", style: { shape: "rectangle", width: "data(w)", height: "data(h)" } }],
  });
  const places = new Map();
  outer.nodes().forEach((n) => {
    const { x, y } = n.position();
    const of = rows.get(n.id());
    if (!of) { places.set(n.id(), { x, y }); return; }
    of.forEach((row, i) => {
      let left = x - long(row) / 2 + 7;
      for (const one of row) {
        places.set(one.id, { x: left + width(one.label) / 2, y: y + 46 * (i - (of.length - 1) / 2) });
        left += width(one.label) + 14;
      }
    });
  });
  outer.destroy();
  return places;
}

// The darker, the larger a part of the plan's time.
function shade(node, most) {
  const us = (node.data("kernels") ?? []).reduce((sum, i) => sum + kernels[i].us, 0);
  const part = Math.round(8 + 62 * Math.sqrt(Math.min(1, us / most)));
  return mix(color("--warm"), color("--panel"), part / 100);
}

function mix(a, b, part) {
  const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [x, y] = [parse(a), parse(b)];
  return `rgb(${x.map((v, i) => Math.round(part * v + (1 - part) * y[i])).join(",")})`;
}

function highlight(numbers, isSearch) {
  graph.batch(() => graph.nodes().forEach((n) => {
    const of = n.data("kernels") ?? [];
    n.toggleClass("out", isSearch && !of.some((i) => numbers.has(i)));
  }));
}

// The charts

function chart(id, config) {
  const options = { animation: false, maintainAspectRatio: false, responsive: true, ...config.options };
  Chart.defaults.color = color("--faint");
  Chart.defaults.borderColor = color("--line");
  charts.push(new Chart(byId(id), { ...config, options }));
}

const decade = (value) => Math.abs(Math.log10(value) % 1) < 1e-6 ? (value < 1 ? String(value) : count(value)) : "";
const thin = { color: (at) => decade(at.tick?.value ?? 1) ? color("--line") : "transparent" };
const axis = (text, more = {}) => ({ title: { display: true, text }, ...more });
const pick = (points) => (event, found) => {
  if (found.length && found[0].datasetIndex === 0) select(points[found[0].index].number);
};

function roofline() {
  const points = kernels.filter((k) => k.measured && k.us > 0 && k.bytes > 0 && k.flop > 0)
    .map((k) => ({ x: k.flop / k.bytes, y: k.flop / k.us / 1e3, number: k.number, r: k.us }));
  const left = kernels.length - points.length;
  byId("roof-note").textContent = left ? `${left} of ${kernels.length} kernels without floating-point operations, `
    + "or that were not measured, have no place in it." : "";
  const roof = data.roof.map(([x, y]) => ({ x, y }));
  const largest = Math.max(...points.map((p) => p.r), 1e-9);
  chart("roofline", {
    type: "scatter",
    data: { datasets: [
      { label: "kernels", data: points, backgroundColor: color("--accent"),
        pointRadius: points.map((p) => 3 + 9 * Math.sqrt(p.r / largest)) },
      { label: "what the machine can do", data: roof, showLine: true, pointRadius: 0,
        borderColor: color("--warm"), borderWidth: 2 },
    ] },
    options: {
      onClick: pick(points),
      scales: {
        x: axis("FLOP per byte", { type: "logarithmic", grid: thin, ticks: { callback: decade, maxRotation: 0, autoSkip: false } }),
        y: axis("GFLOP/s", { type: "logarithmic", grid: thin, ticks: { callback: decade, autoSkip: false } }),
      },
      plugins: { tooltip: { callbacks: { label: (at) => at.raw.number === undefined ? ""
        : `kernel ${at.raw.number}: ${at.raw.y.toFixed(1)} GFLOP/s` } } },
    },
  });
}

// A row for each provider's kernels, and, if somebody looked, one for each thread.
function timeline() {
  let at = 0;
  const spans = kernels.map((k, i) => {
    const us = data.spans_us[i] ?? k.run_us ?? k.us;
    const span = { number: k.number, range: [at, at + us], us, row: k.provider };
    at += us;
    return span;
  });
  for (const [number, thread, begin, end] of data.threads) {
    spans.push({ number, range: [begin, end], us: end - begin, row: `thread ${thread}` });
  }
  const names = [...new Set(kernels.map((k) => k.provider)),
    ...[...new Set(data.threads.map((t) => t[1]))].sort((x, y) => x - y).map((t) => `thread ${t}`)];
  byId("timeline-box").style.height = `${90 + 34 * names.length}px`;
  chart("timeline", {
    type: "bar",
    data: { labels: names, datasets: [{
      label: "kernels", minBarLength: 1, grouped: false, barPercentage: 0.9,
      data: spans.map((s) => ({ x: s.range, y: s.row })),
      backgroundColor: spans.map((s) => s.number % 2 ? color("--accent") : color("--warm")),
    }] },
    options: {
      indexAxis: "y", onClick: pick(spans),
      scales: { x: axis("µs since the run began", { beginAtZero: true }) },
      plugins: { legend: { display: false }, tooltip: { callbacks: {
        title: () => "", label: (i) => `kernel ${spans[i.dataIndex].number}, ${spans[i.dataIndex].row}: ${time(spans[i.dataIndex].us)}` } } },
    },
  });
}

function memory() {
  chart("memory", {
    type: "line",
    data: { labels: data.memory.map((_, i) => i), datasets: [
      { label: "live bytes of the arena (MiB)", data: data.memory.map((b) => b / 2 ** 20), stepped: true,
        fill: true, borderColor: color("--accent"), backgroundColor: mix(color("--accent"), color("--panel"), 0.25), pointRadius: 0 },
      { label: "the arena (MiB)", data: data.memory.map(() => data.arena_bytes / 2 ** 20),
        borderColor: color("--warm"), pointRadius: 0 },
    ] },
    options: { scales: { x: axis("kernel"), y: axis("MiB", { beginAtZero: true }) } },
  });
}

function search() {
  byId("solver-box").hidden = !data.stories.length;
  if (!data.stories.length) return;
  const { rounds, note } = data.stories[Number(byId("story").value) || 0];
  const ms = (ns) => ns === null ? "no plan" : `${(ns / 1e6).toFixed(3)} ms`;
  const say = (r) => `after ${r.seconds.toFixed(1)} s ${ms(r.incumbent_ns)}, bound ${ms(r.bound_ns)}, ${r.measured} measured`;
  const last = rounds[rounds.length - 1];
  byId("story-note").textContent = [note, rounds.length > 1 ? `${say(rounds[0])}; ${say(last)}` : say(last)]
    .filter((text) => text).join("; ");
  const line = (label, values, name, more = {}) => ({
    label, data: rounds.map((r) => ({ x: r.seconds, y: values(r) })).filter((p) => p.y !== null),
    showLine: true, stepped: true, borderColor: color(name), backgroundColor: color(name), pointRadius: 2, ...more,
  });
  chart("solver", {
    type: "scatter",
    data: { datasets: [
      line("best plan (ms)", (r) => r.incumbent_ns === null ? null : r.incumbent_ns / 1e6, "--accent"),
      line("no plan costs less (ms)", (r) => r.bound_ns / 1e6, "--warm"),
      line("candidates measured", (r) => r.measured, "--faint", { yAxisID: "right", borderDash: [4, 4] }),
    ] },
    options: { scales: {
      x: axis("seconds of the search"), y: axis("ms", { beginAtZero: true }),
      right: axis("measured", { beginAtZero: true, position: "right", grid: { drawOnChartArea: false } }),
    } },
  });
}

function redrawCharts() {
  while (charts.length) charts.pop().destroy();
  roofline(); timeline(); memory(); search();
}

function redraw() {
  redrawCharts(); draw(); list();
  if (selected >= 0) select(selected);
}

facts();
for (const button of document.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => {
    view = button.dataset.view;
    for (const other of document.querySelectorAll("[data-view]")) {
      other.setAttribute("aria-pressed", other === button);
    }
    draw();
    list();
    if (selected >= 0) select(selected);
  });
}
byId("search").addEventListener("input", list);
byId("story").addEventListener("change", () => {
  charts.splice(charts.indexOf(Chart.getChart("solver")), 1)[0].destroy();
  search();
});
byId("fit").addEventListener("click", () => graph.fit());
byId("closer").addEventListener("click", () => graph.zoom(graph.zoom() * 1.4));
byId("farther").addEventListener("click", () => graph.zoom(graph.zoom() / 1.4));
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") { byId("search").value = ""; list(); }
});
byId("details").addEventListener("keydown", (event) => { if (event.key === "Escape") back(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
matchMedia("print").addEventListener("change", redrawCharts); // paper is light
redraw();
if (kernels.length) select([...kernels].sort((a, b) => b.us - a.us)[0].number);
