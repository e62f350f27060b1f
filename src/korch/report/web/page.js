// The page of one plan: facts, kernels, graph, roofline, timeline, memory, search. The page contains
// its data; the table of kernels has the content of the graph and the charts as text.
const { Chart, cytoscape, highlighter } = korchLibraries;
const data = JSON.parse(document.getElementById("data").textContent);
const kernels = data.kernels;
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
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
const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const ratio = (k) => k.measured && k.bound_us > 0 ? k.us / k.bound_us : null;

// Facts

function facts() {
  byId("headline").append(...data.headline.map(([value, meaning]) =>
    element("div", {}, element("dt", {}, value), element("dd", {}, meaning))));
  byId("facts").append(...data.facts.map(([title, rows]) => element("div", { class: "panel" },
    element("h3", {}, title), element("dl", { class: "facts", "aria-label": title }, ...rows.map(([name, value]) =>
      element("div", {}, element("dd", {}, value), element("dt", {}, name)))))));
  byId("first").hidden = !data.slowest.length;
  byId("slowest").append(...data.slowest.map(([number, [cost, ...reasons]]) => element("li", {},
    element("button", { class: "link", onclick: () => show(number) }, `Kernel ${number}`), ` ${cost}`,
    element("span", { class: "why" }, reasons.join("; ")))));
  byId("run-note").textContent = data.run_note;
  for (const [i, trace] of data.traces.entries()) {
    byId("trace").append(element("option", { value: i }, trace.name));
  }
  byId("plans").hidden = !data.plans.length;
  byId("rules").hidden = !data.rules.length;
  if (data.plans.length) {
    byId("plans").append(table(
      ["plan", "kernels", "sum", "median", "10–90 %", "error", "outcome"],
      data.plans.map((row) => [
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
  ["computes", (k) => k.operations, (k) => k.layer ? `${k.layer}: ${k.operations}` : k.operations],
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
  byId("found").textContent = needle ? `${rows.length} of ${counted(kernels.length, "kernel")}` : counted(kernels.length, "kernel");
  if (graph) highlight(new Set(rows.map((k) => k.number)), needle !== "");
}

// Only one row can be reached with the Tab key; the arrow keys move to other rows.
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

function select(number, isFirst = false) {
  selected = number;
  const k = kernels[number];
  for (const row of document.querySelectorAll("tr.kernel")) {
    const is = Number(row.dataset.kernel) === number;
    row.setAttribute("aria-selected", is);
    if (is) stop(row);
  }
  byId("status").textContent = `Kernel ${number}: ${k.operations}, ${k.why}`;
  const isFaster = k.rivals.some((r) => r.lost);
  const rivals = k.rivals.map((r) => [r.what, r.cost, r.more, ...(isFaster ? [r.lost] : [])]);
  const groupings = k.groupings.map((g) => element("li", {},
    element("b", {}, g.more), ` ${g.cost}: `, g.what, element("span", { class: "faint" }, ` instead of ${g.instead}`),
    g.lost ? element("span", { class: "slow" }, `; not in the plan: ${g.lost}`) : null));
  byId("details").replaceChildren(
    element("h2", { id: "details-title", tabindex: -1 }, `Kernel ${k.number}`),
    element("p", {}, k.operations),
    table(["", ""], [
      ["made by", `${k.provider}${k.variant ? `, ${k.variant}` : ""}`],
      ["cost", `${k.measured ? time(k.us) : `at least ${time(k.us)}, not measured`}`],
      ["why", k.why],
      ["bound", `no kernel takes less than ${time(k.bound_us)}${ratio(k) ? `; this one takes ${ratio(k).toFixed(1)} times as long` : ""}`],
      ["in a run", k.run_us === null ? "not run" : time(k.run_us)],
      ...(k.load ? [["threads", `the one that works longest: ${k.load}`]] : []),
      ["reads", k.inputs.join("; ") || "nothing"], ["writes", k.outputs.join("; ")],
      ["moves", `${size(k.bytes)}, ${k.us ? (k.bytes / k.us / 1e3).toFixed(1) : "–"} GB/s`],
      ["computes", `${count(k.flop)}FLOP, ${k.us ? (k.flop / k.us / 1e3).toFixed(1) : "–"} GFLOP/s`],
      ["from", k.origins.join(", ") || (k.rules.length ? "what rules wrote" : "a change of layout")],
      ["rules", k.rules.join(", ") || "none"],
    ], true),
    element("h3", {}, "Other ways to run the same"),
    rivals.length ? table(["candidate", "cost", "takes more", ...(isFaster ? ["faster, but not in the plan because"] : [])], rivals)
      : element("p", { class: "faint" }, "There is no other candidate for exactly these primitives."),
    element("h3", {}, "Other groupings of the same work"),
    groupings.length ? element("ul", { class: "groupings" }, ...groupings)
      : element("p", { class: "faint" }, "None was measured."),
    ...(k.described ? [element("h3", {}, "Program"), element("pre", { tabindex: 0 }, k.described)] : []),
    element("h3", {}, "Primitives"), element("pre", { tabindex: 0 }, k.primitives),
    element("h3", {}, "Code"), source(k),
  );
  if (graph) {
    graph.elements().unselect();
    const nodes = graph.nodes().filter((n) => (n.data("kernels") ?? []).includes(number));
    nodes.select();
    if (nodes.length && !isFirst) bring(nodes); // the page opens with the whole graph
  }
}

function source(k) {
  const text = data.sources[k.symbol] ?? "";
  if (!text) return element("p", { class: "faint" }, "The artifact has no code of it.");
  const code = element("code");
  code.innerHTML = highlighter.highlight(text, { language: data.language }).value;
  return element("pre", { tabindex: 0 }, code);
}

function redrawCharts() {
  while (charts.length) charts.pop().destroy();
  roofline(); timeline(); memory(); search();
}

function redraw() {
  redrawCharts(); draw(); list();
  if (selected >= 0) select(selected, true);
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
    if (selected >= 0) select(selected, true);
  });
}
byId("search").addEventListener("input", list);
byId("trace").addEventListener("change", () => {
  charts.splice(charts.indexOf(Chart.getChart("solver")), 1)[0].destroy();
  search();
});
byId("fit").addEventListener("click", fit);
byId("closer").addEventListener("click", () => graph.zoom(graph.zoom() * 1.4));
byId("farther").addEventListener("click", () => graph.zoom(graph.zoom() / 1.4));
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") { byId("search").value = ""; list(); }
});
byId("details").addEventListener("keydown", (event) => { if (event.key === "Escape") back(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
matchMedia("print").addEventListener("change", redrawCharts); // printed pages use the light colours
redraw();
if (kernels.length) select([...kernels].sort((a, b) => b.us - a.us)[0].number, true);
