// The charts: roofline, timeline, memory, search.

function chart(id, config) {
  const options = { animation: false, maintainAspectRatio: false, responsive: true, ...config.options };
  Chart.defaults.color = color("--faint");
  Chart.defaults.borderColor = color("--line");
  charts.push(new Chart(byId(id), { ...config, options }));
}

const decade = (value) => Math.abs(Math.log10(value) % 1) < 1e-6 ? (value < 1 ? String(value) : count(value)) : "";
const thin = { color: (at) => decade(at.tick?.value ?? 1) ? color("--line") : "transparent" };
const axis = (text, more = {}) => ({ title: { display: true, text }, ...more });
const pick = (...sets) => (event, found) => {
  if (found.length && sets[found[0].datasetIndex]) select(sets[found[0].datasetIndex][found[0].index].number);
};

function roofline() {
  const points = kernels.filter((k) => k.measured && k.us > 0 && k.bytes > 0 && k.flop > 0)
    .map((k) => ({ x: k.flop / k.bytes, y: k.flop / k.us / 1e3, number: k.number, r: k.us, isFloat: k.is_float }));
  const left = kernels.length - points.length;
  const [floats, others] = [true, false].map((isFloat) => points.filter((p) => p.isFloat === isFloat));
  byId("roof-note").textContent = [
    left ? `${left} of ${counted(kernels.length, "kernel")} without operations, or that were not measured, are not shown.` : "",
    others.length ? "The roof is for float32; kernels that read integers may exceed it." : "",
  ].join(" ").trim();
  const roof = data.roof.map(([x, y]) => ({ x, y }));
  const largest = Math.max(...points.map((p) => p.r), 1e-9);
  chart("roofline", {
    type: "scatter",
    data: { datasets: [
      ...[["kernels", floats, "--accent"], ["kernels that read integers", others, "--good"]].map(([label, own, name]) => ({
        label, data: own, backgroundColor: color(name),
        pointRadius: own.map((p) => 3 + 9 * Math.sqrt(p.r / largest)) })),
      { label: "what the machine can do with float32", data: roof, showLine: true, pointRadius: 0,
        borderColor: color("--warm"), borderWidth: 2 },
    ] },
    options: {
      onClick: pick(floats, others),
      scales: {
        x: axis("FLOP per byte", { type: "logarithmic", grid: thin, ticks: { callback: decade, maxRotation: 0, autoSkip: false } }),
        y: axis("GFLOP/s", { type: "logarithmic", grid: thin, ticks: { callback: decade, autoSkip: false } }),
      },
      plugins: { legend: { labels: { filter: (item, all) => all.datasets[item.datasetIndex].data.length > 0 } },
        tooltip: { callbacks: { label: (at) => at.raw.number === undefined ? ""
        : `kernel ${at.raw.number}: ${at.raw.y.toFixed(1)} GFLOP/s` } } },
    },
  });
}

// The timeline: a row for each provider's kernels, and one for each thread if threads were recorded.
function timeline() {
  let at = 0;
  const spans = kernels.map((k, i) => {
    const us = data.spans_us[i] ?? k.run_us ?? k.us; // the time in the shown run, else measured alone
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
      data: spans.map((s) => ({ x: s.range.map((us) => us / 1000), y: s.row })),
      backgroundColor: spans.map((s) => s.number % 2 ? color("--accent") : color("--warm")),
    }] },
    options: {
      indexAxis: "y", onClick: pick(spans),
      scales: { x: axis("ms since the run began", { beginAtZero: true, max: at / 1000 }) },
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
  byId("solver-box").hidden = !data.traces.length;
  if (!data.traces.length) return;
  const { rounds, note } = data.traces[Number(byId("trace").value) || 0];
  const ms = (ns) => ns === null ? "no plan" : `${(ns / 1e6).toFixed(3)} ms`;
  const say = (r) => `after ${r.seconds.toFixed(1)} s ${ms(r.incumbent_ns)}, bound ${ms(r.bound_ns)}, ${r.measured} measured`;
  const last = rounds[rounds.length - 1];
  byId("trace-note").textContent = [note, rounds.length > 1 ? `${say(rounds[0])}; ${say(last)}` : say(last)]
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

