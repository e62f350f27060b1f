// The graph of the plan: its kernels, its primitives in boxes (one for each kernel), or the model's operators.

const READABLE = 0.8; // the least zoom at which labels can be read
const LINE = 14; // height of a line of a label
const MOST_LETTERS = 26; // most characters in a line of a label
const ROW_GAP = 30;
const COLUMN_GAP = 44;

function draw() {
  const chosen = data.graphs[view];
  const most = Math.max(...kernels.map((k) => k.us), 1e-9);
  const labels = new Map(chosen.nodes.map((n) => [n.id, wrapped(n.label)]));
  const sizes = new Map([...labels].map(([id, text]) => [id, sizeOf(text)]));
  const { places, far } = placed(chosen, sizes);
  const nodes = chosen.nodes.map((n) => ({
    data: { ...n, label: labels.get(n.id), ...sizes.get(n.id) }, position: places.get(n.id),
  }));
  const edges = chosen.edges.map(([source, target], i) => ({
    data: { id: `e${i}`, source, target }, classes: far(source, target) ? "far" : "",
  }));
  if (graph) graph.destroy();
  graph = cytoscape({
    container: byId("graph"), elements: [...nodes, ...edges], layout: { name: "preset", padding: 12 },
    textureOnViewport: nodes.length > 300, hideEdgesOnViewport: nodes.length > 600, maxZoom: 4,
    style: [
      { selector: "node", style: {
        label: "data(label)", shape: "round-rectangle", width: "data(w)", height: "data(h)", "text-wrap": "wrap",
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
      // Edges between columns: they cross other nodes, so they are drawn faintly.
      { selector: ".far", style: { opacity: 0.35, "line-style": "dashed" } },
    ],
  });
  fit();
  graph.on("tap", "node", (event) => {
    const of = event.target.data("kernels") ?? [];
    if (of.length) select(of.includes(selected) ? of[(of.indexOf(selected) + 1) % of.length] : of[0]);
  });
}

function fit() {
  graph.fit(undefined, 12);
  if (graph.zoom() > 1.2) graph.zoom(1.2).center();
}

// Scroll and zoom so that a kernel's nodes are visible and their labels can be read.
function bring(nodes) {
  const { x1, y1, x2, y2 } = nodes.boundingBox();
  const seen = graph.extent();
  const isSeen = x1 >= seen.x1 && y1 >= seen.y1 && x2 <= seen.x2 && y2 <= seen.y2;
  if (!isSeen || graph.zoom() < READABLE) graph.zoom(Math.max(graph.zoom(), READABLE)).center(nodes);
}

// Break a label into lines: at spaces, slashes and dots, and within words that are longer than a line.
function wrapped(label) {
  const lines = [""];
  for (const word of label.match(/[^\s/.]+[\s/.]*|[\s/.]+/g) ?? []) {
    for (let i = 0; i < word.length; i += MOST_LETTERS) {
      const part = word.slice(i, i + MOST_LETTERS);
      const last = lines[lines.length - 1];
      if (last && (last + part).trimEnd().length > MOST_LETTERS) lines.push(part);
      else lines[lines.length - 1] = last + part;
    }
  }
  return lines.map((line) => line.trimEnd()).join("\n");
}

const pen = document.createElement("canvas").getContext("2d");
function sizeOf(text) {
  pen.font = "11px Helvetica Neue, Helvetica, sans-serif"; // the graph's own font
  const lines = text.split("\n");
  return { w: Math.ceil(Math.max(...lines.map((line) => pen.measureText(line).width))) + 18, h: LINE * lines.length + 10 };
}

// Compute the positions of nodes. Dagre places the boxes of kernels, or the nodes if there are no boxes. Inside
// of each box, a primitive is placed below all primitives that it reads. (Dagre itself takes seconds to place
// hundreds of nested boxes.) Then a graph that is much higher than wide is folded into columns.
function placed(chosen, sizes) {
  const inside = chosen.nodes.filter((n) => n.parent);
  const parent = new Map(inside.map((n) => [n.id, n.parent]));
  const box = (id) => parent.get(id) ?? id;
  const rows = rowsInside(inside, parent, chosen.edges);
  const long = (row) => row.reduce((sum, n) => sum + sizes.get(n.id).w + 14, 0);
  const boxes = chosen.nodes.filter((n) => !n.parent).map((n) => {
    const of = rows.get(n.id) ?? [];
    const { w, h } = sizes.get(n.id);
    return of.length ? { id: n.id, w: Math.max(w, ...of.map(long)) + 20, h: 46 * of.length + 24 } : { id: n.id, w, h };
  });
  const between = new Map(chosen.edges.map(([a, b]) => [box(a), box(b)])
    .filter(([a, b]) => a !== b).map((pair) => [pair.join(" "), pair]));
  const outer = cytoscape({
    headless: true, styleEnabled: true,
    elements: [...boxes.map((b) => ({ data: b })),
      ...[...between.values()].map(([source, target]) => ({ data: { source, target } }))],
    layout: { name: "dagre", rankDir: "TB", nodeSep: 14, rankSep: ROW_GAP, animate: false },
    style: [{ selector: "node", style: { shape: "rectangle", width: "data(w)", height: "data(h)" } }],
  });
  const { width, height } = byId("graph").getBoundingClientRect();
  const columns = folded(boxes.map((b) => ({ ...b, ...outer.getElementById(b.id).position() })), width, height);
  outer.destroy();
  const places = new Map();
  for (const { id, x, y } of columns.boxes) {
    const of = rows.get(id);
    if (!of) places.set(id, { x, y });
    else of.forEach((row, i) => {
      let left = x - long(row) / 2 + 7;
      for (const one of row) {
        const { w } = sizes.get(one.id);
        places.set(one.id, { x: left + w / 2, y: y + 46 * (i - (of.length - 1) / 2) });
        left += w + 14;
      }
    });
  }
  return { places, far: (a, b) => columns.of.get(box(a)) !== columns.of.get(box(b)) };
}

// Return the primitives by box and depth.
function rowsInside(inside, parent, edges) {
  const depth = new Map(inside.map((n) => [n.id, 0]));
  const own = edges.filter(([a, b]) => parent.has(a) && parent.get(a) === parent.get(b));
  for (let changed = true, turns = 0; changed && turns <= inside.length; turns += 1) {
    changed = false;
    for (const [a, b] of own) {
      if (depth.get(b) <= depth.get(a)) { depth.set(b, depth.get(a) + 1); changed = true; }
    }
  }
  const rows = new Map();
  for (const n of inside) {
    const of = rows.get(n.parent) ?? rows.set(n.parent, []).get(n.parent);
    (of[depth.get(n.id)] ??= []).push(n);
  }
  return rows;
}

// Fold the graph into the number of columns at which it can be shown largest in a window of this shape.
function folded(boxes, width, height) {
  const top = Math.min(...boxes.map((b) => b.y - b.h / 2));
  const whole = Math.max(...boxes.map((b) => b.y + b.h / 2)) - top;
  let best = { zoom: 0 };
  for (let count = 1; count <= 12; count += 1) {
    const found = inColumns(boxes, top, whole / count, count);
    const zoom = Math.min(width / found.width, height / found.height, 1.2);
    if (zoom > best.zoom * 1.05) best = { ...found, zoom };
  }
  return best.boxes ? best : { boxes, of: new Map() };
}

function inColumns(boxes, top, high, count) {
  const parts = Array.from({ length: count }, () => []);
  for (const b of boxes) parts[Math.min(count - 1, Math.floor((b.y - top) / (high || 1)))].push(b);
  const of = new Map();
  const moved = [];
  let left = 0;
  let height = 0;
  for (const [i, part] of parts.filter((p) => p.length).entries()) {
    const x1 = Math.min(...part.map((b) => b.x - b.w / 2));
    const y1 = Math.min(...part.map((b) => b.y - b.h / 2));
    for (const b of part) { of.set(b.id, i); moved.push({ ...b, x: b.x - x1 + left, y: b.y - y1 }); }
    left += Math.max(...part.map((b) => b.x + b.w / 2)) - x1 + COLUMN_GAP;
    height = Math.max(height, Math.max(...part.map((b) => b.y + b.h / 2)) - y1);
  }
  return { boxes: moved, of, width: left - COLUMN_GAP + 24, height: height + 24 };
}

// Return a node's colour: the larger its part of the plan's time, the darker.
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
