// Charts (uPlot), following a run under way, parts that load later, and keys. Everything else is made by the server.
"use strict";

const PLOTS = new Map();
const SYNC = uPlot.sync("steps");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function figure(value, percent) {
  if (value == null) return "–";
  if (percent) return (100 * value).toFixed(1) + "%";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size && size < 0.001 ? value.toExponential(1) : String(+value.toPrecision(3));
}

// A number beside an axis, with all digits that tell it from the next one.
function tick(value, percent) {
  if (percent) return +(100 * value).toPrecision(6) + "%";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size && size < 0.001 ? (+value.toPrecision(8)).toExponential() : String(+value.toPrecision(8));
}

// How curves are drawn, as the address says it: smoothing, a logarithmic axis, lines that are off.
function drawing() {
  const asked = new URLSearchParams(location.search);
  return { smooth: Math.min(0.99, Math.max(0, +asked.get("smooth") || 0)), log: asked.has("log"), off: asked.getAll("off") };
}

// An exponential mean that begins without a bias; gaps stay gaps.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, share = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

function columns(chart) {
  const { smooth } = drawing(), data = [chart.steps];
  for (const series of chart.series) {
    data.push(series.low ? series.values : smoothed(series.values, smooth)); // an interval is of what was measured
    if (series.low) data.push(series.low, series.high);
  }
  if (smooth) for (const series of chart.series) if (!series.low) data.push(series.values);
  return data;
}

// Only positive values have a place on a logarithmic axis.
function logarithmic(chart) {
  return drawing().log && chart.series.every((line) => [line.values, line.low ?? []].every((list) => list.every((value) => value == null || value > 0)));
}

function seriesOf(chart) {
  const series = [{ label: "step" }], bands = [], { smooth, off } = drawing();
  chart.series.forEach((line, place) => {
    const stroke = colour("--h" + (place % 8));
    const dash = place >= 8 ? [6, 4] : undefined;
    series.push({
      label: line.label, stroke, width: 1.8, dash, spanGaps: true, show: !off.includes(line.label),
      points: { show: chart.steps.length < 40, size: 5 },
      value: (_, value) => figure(value, chart.percent),
    });
    if (line.low) {
      const at = series.length;
      for (const end of ["low", "high"]) series.push({ label: end, stroke: "transparent", spanGaps: true, show: !off.includes(line.label), points: { show: false }, value: (_, v) => figure(v, chart.percent) });
      bands.push({ series: [at + 1, at], fill: stroke + "26" });
    }
  });
  if (smooth) chart.series.forEach((line, place) => line.low || series.push({
    label: line.label, class: "raw", stroke: colour("--h" + (place % 8)) + "40", width: 1, spanGaps: true, points: { show: false }, show: !off.includes(line.label),
  }));
  return { series, bands };
}

function openStep(plot, chart, place = plot.cursor.idx) {
  if (document.body.dataset.still || place == null) return;
  const near = chart.series.findIndex((_, i) => plot.series[i + 1] && plot.series[i + 1]._focus);
  const series = chart.series[Math.max(0, near)];
  const query = new URLSearchParams({ step: chart.steps[place], phase: chart.phase });
  location.href = `/run/${encodeURIComponent(series.run)}/episodes?${query}`;
}

function draw(figureElement, chart) {
  const box = figureElement.querySelector(".plot");
  const { series, bands } = seriesOf(chart);
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui" };
  const plot = new uPlot({
    width: box.clientWidth, height: 190, padding: [6, 10, 0, 0], series, bands,
    scales: { x: { time: false }, y: logarithmic(chart) ? { distr: 3 } : { range: (_, low, high) => span(low, high, chart.percent) } },
    axes: [
      { ...axis, space: 40, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], size: 30 },
      { ...axis, size: 58, values: (_, ticks) => ticks.map((value) => (value == null ? "" : tick(value, chart.percent))) },
    ],
    cursor: { sync: { key: SYNC.key }, focus: { prox: 24 } },
    focus: { alpha: 0.35 },
    hooks: { ready: [(made) => made.setLegend({ idx: chart.steps.length - 1 })] },
  }, columns(chart), box);
  byKeyboard(box, plot, chart);
  let pressed = 0;
  plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  plot.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - pressed) < 4) openStep(plot, chart); });
  plot.over.addEventListener("mouseleave", () => plot.setLegend({ idx: plot.data[0].length - 1 }));
  PLOTS.set(chart.id, { plot, box, lines: chart.series.map((line) => line.label).join() });
}

// Arrow keys move along the steps, Enter opens the episodes of one; what stands there is said.
function byKeyboard(box, plot, chart) {
  const told = box.parentElement.querySelector("[role=status]");
  let place = chart.steps.length - 1;
  box.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Enter") return openStep(plot, chart, place);
    if (by == null) return;
    event.preventDefault();
    place = Math.max(0, Math.min(chart.steps.length - 1, place + by));
    plot.setCursor({ left: plot.valToPos(chart.steps[place], "x"), top: 10 });
    plot.setLegend({ idx: place });
    if (told) told.textContent = `step ${chart.steps[place]}: ` + chart.series.map((line) => `${line.label} ${figure(line.values[place], chart.percent)}`).join(", ");
  };
}

function span(low, high, percent) {
  if (low == null) return [0, 1];
  if (percent && low >= 0 && high <= 1) return [0, Math.max(high * 1.08, 0.05)];
  const gap = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - gap < 0 ? 0 : low - gap, high + gap];
}

function drawAll() {
  const source = document.getElementById("charts");
  for (const chart of source ? JSON.parse(source.textContent) : []) {
    const place = document.querySelector(`[data-chart="${CSS.escape(chart.id)}"]`);
    const known = PLOTS.get(chart.id);
    if (known && known.lines === chart.series.map((line) => line.label).join()) known.plot.setData(columns(chart));
    else if (place) { known?.plot.destroy(); draw(place, chart); }
  }
}

// Smoothing, axis and lines are chosen for all charts of the page, and kept in its address.
function choose() {
  const form = document.getElementById("drawing");
  if (!form) return;
  const now = drawing(), labels = form.querySelector(".labels");
  const source = JSON.parse(document.getElementById("charts").textContent);
  form.elements.smooth.value = now.smooth;
  form.elements.log.checked = now.log;
  for (const label of new Set(source.flatMap((chart) => chart.series.map((line) => line.label)))) {
    const box = Object.assign(document.createElement("input"), { type: "checkbox", name: "on", value: label, checked: !now.off.includes(label) });
    const named = document.createElement("label");
    named.append(box, " ", label);
    labels.append(named);
  }
  form.addEventListener("input", () => {
    const asked = new URLSearchParams(location.search);
    for (const name of ["smooth", "log", "off"]) asked.delete(name);
    if (+form.elements.smooth.value) asked.set("smooth", form.elements.smooth.value);
    if (form.elements.log.checked) asked.set("log", 1);
    for (const box of labels.querySelectorAll("input:not(:checked)")) asked.append("off", box.value);
    history.replaceState(null, "", `${location.pathname}${asked.size ? "?" + asked : ""}`);
    redraw();
  });
}

function redraw() {
  PLOTS.forEach(({ plot }) => plot.destroy());
  PLOTS.clear();
  drawAll();
}

async function load(element) {
  const answer = await fetch(element.dataset.load);
  if (answer.ok) element.innerHTML = await answer.text();
}

async function refresh() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of page.querySelectorAll("[data-load]")) {
    part.innerHTML = document.querySelector(`[data-load="${CSS.escape(part.dataset.load)}"]`)?.innerHTML ?? "";
  }
  for (const old of document.querySelectorAll("[data-live][id]")) {
    const fresh = page.getElementById(old.id);
    if (fresh && fresh.innerHTML !== old.innerHTML) old.innerHTML = fresh.innerHTML;
  }
  drawAll();
  document.querySelectorAll("[data-load]").forEach(load);
}

function follow() {
  const { follow: address, stamp } = document.body.dataset;
  if (!address) return;
  let known = stamp;
  const timer = setInterval(async () => {
    if (document.hidden) return;
    const found = await fetch(address).then((answer) => answer.json()).catch(() => null);
    if (!found) return;
    const now = document.getElementById("now");
    if (now) now.textContent = found.now;
    const ended = !["under way", "recording"].includes(found.state);
    if (found.stamp !== known || ended) await refresh();
    known = found.stamp;
    if (ended) clearInterval(timer);
  }, 2000);
}

function step(by) {
  const items = [...document.querySelectorAll(".item .main")];
  const next = items[items.indexOf(document.activeElement) + by] ?? (by > 0 ? items[0] : items.at(-1));
  next?.focus();
  next?.scrollIntoView({ block: "center" });
}

// Thumbs and notes: what was said is kept by the server; a thumb that is pressed again is taken back.
async function keep(box) {
  const pressed = box.querySelector("button[aria-pressed=true]"), told = box.querySelector("[role=status]");
  const body = { id: box.dataset.note, score: pressed ? +pressed.value : null, note: box.querySelector("textarea").value };
  const asked = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(box.dataset.post, asked).catch(() => null);
  const found = await answer?.json().catch(() => null);
  told.textContent = answer?.ok ? "kept" : `not kept: ${found?.error?.message ?? (answer ? `the server answered ${answer.status}` : "the server does not answer")}`;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-note] button");
  if (!button) return;
  const box = button.closest("[data-note]"), again = button.getAttribute("aria-pressed") === "true";
  for (const one of box.querySelectorAll("button")) one.setAttribute("aria-pressed", String(one === button && !again));
  keep(box);
});
document.addEventListener("change", (event) => {
  const box = event.target.matches("[data-note] textarea") && event.target.closest("[data-note]");
  if (box) keep(box);
});

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  n: () => document.querySelector("[rel=next]")?.click(),
  p: () => document.querySelector("[rel=prev]")?.click(),
  "?": () => document.getElementById("keys").showModal(),
  "/": () => {
    const field = document.querySelector("input[type=search]");
    if (field) field.focus();
    else document.getElementById("to-episodes")?.click();
  },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const act = KEYS[event.key] ?? (/^[1-9]$/.test(event.key) ? () => document.querySelectorAll("nav a")[event.key - 1]?.click() : null);
  if (act) { event.preventDefault(); act(); }
});

addEventListener("resize", () => PLOTS.forEach(({ plot, box }) => plot.setSize({ width: box.clientWidth, height: 190 })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

choose();
drawAll();
document.querySelectorAll("[data-load]").forEach(load);
follow();
document.documentElement.dataset.ready = "yes";
