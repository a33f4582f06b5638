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

function columns(chart) {
  const data = [chart.steps];
  for (const series of chart.series) {
    data.push(series.values);
    if (series.low) data.push(series.low, series.high);
  }
  return data;
}

function seriesOf(chart) {
  const series = [{ label: "step" }], bands = [];
  chart.series.forEach((line, place) => {
    const stroke = colour("--h" + (place % 8));
    const dash = place >= 8 ? [6, 4] : undefined;
    series.push({
      label: line.label, stroke, width: 1.8, dash, spanGaps: true,
      points: { show: chart.steps.length < 40, size: 5 },
      value: (_, value) => figure(value, chart.percent),
    });
    if (line.low) {
      const at = series.length;
      for (const end of ["low", "high"]) series.push({ label: end, stroke: "transparent", spanGaps: true, points: { show: false }, value: (_, v) => figure(v, chart.percent) });
      bands.push({ series: [at + 1, at], fill: stroke + "26" });
    }
  });
  return { series, bands };
}

function openStep(plot, chart) {
  if (document.body.dataset.still) return;
  const place = plot.cursor.idx;
  if (place == null) return;
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
    scales: { x: { time: false }, y: { range: (_, low, high) => span(low, high, chart.percent) } },
    axes: [
      { ...axis, space: 40, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], size: 30 },
      { ...axis, size: 58, values: (_, ticks) => ticks.map((value) => tick(value, chart.percent)) },
    ],
    cursor: { sync: { key: SYNC.key }, focus: { prox: 24 } },
    focus: { alpha: 0.35 },
    hooks: { ready: [(made) => made.setLegend({ idx: chart.steps.length - 1 })] },
  }, columns(chart), box);
  let pressed = 0;
  plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  plot.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - pressed) < 4) openStep(plot, chart); });
  plot.over.addEventListener("mouseleave", () => plot.setLegend({ idx: plot.data[0].length - 1 }));
  PLOTS.set(chart.id, { plot, box, lines: chart.series.map((line) => line.label).join() });
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

async function load(element) {
  const answer = await fetch(element.dataset.load);
  if (answer.ok) element.innerHTML = await answer.text();
  offerTables();
}

// A link below each table that leads to it as a file, with all of its rows.
function offerTables() {
  if (document.body.dataset.still) return;
  const places = new Map();
  for (const table of document.querySelectorAll("main table:not(.u-legend)")) {
    const address = table.closest("[data-load]")?.dataset.load ?? location.href;
    const number = places.get(address) ?? 0, box = table.closest(".scroll") ?? table;
    places.set(address, number + 1);
    if (box.nextElementSibling?.matches(".csv")) continue;
    const there = new URL(address, location.href);
    there.searchParams.set("csv", number);
    there.hash = "";
    const link = document.createElement("a");
    Object.assign(link, { className: "csv", href: there.href, textContent: "CSV", title: "this table as a file, with exact figures and all rows" });
    box.after(link);
  }
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
  offerTables();
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
    document.getElementById("now").textContent = found.now;
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
  told.textContent = answer?.ok ? "kept" : `not kept: ${found?.error?.message ?? "the server does not answer"}`;
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
  const act = KEYS[event.key] ?? (/^[1-8]$/.test(event.key) ? () => document.querySelectorAll("nav a")[event.key - 1]?.click() : null);
  if (act) { event.preventDefault(); act(); }
});

addEventListener("resize", () => PLOTS.forEach(({ plot, box }) => plot.setSize({ width: box.clientWidth, height: 190 })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  PLOTS.forEach(({ plot }) => plot.destroy());
  PLOTS.clear();
  drawAll();
});

drawAll();
offerTables();
document.querySelectorAll("[data-load]").forEach(load);
follow();
document.documentElement.dataset.ready = "yes";
