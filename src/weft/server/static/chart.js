// Lines over time, drawn as SVG.

import { make, rate } from "./dom.js";

export const SPAN = 300; // seconds

// How much a stream had published over time, and the rates between.
export class Series {
  constructor() {
    this.seen = [];
  }

  add(at, published) {
    const last = this.seen.at(-1);
    // Several processes answer in turn; one may have looked before another.
    if (last && at <= last[0]) return;
    this.seen.push([at, Math.max(published, last ? last[1] : 0)]);
    while (this.seen.length > 2 && this.seen[1][0] < at - SPAN) this.seen.shift();
  }

  // Of the last ten seconds.
  now() {
    const last = this.seen.at(-1);
    const from = last && this.seen.find(([at]) => at >= last[0] - 10.5);
    return last && from !== last ? (last[1] - from[1]) / (last[0] - from[0]) : null;
  }

  points() {
    return this.seen.slice(1).map(([at, published], index) => [at, (published - this.seen[index][1]) / (at - this.seen[index][0])]);
  }
}

// The sum of several, at the moments of the one that was looked at last.
export function sum(all) {
  const buckets = new Map();
  for (const series of all) {
    for (const [at, value] of series.points()) {
      const bucket = Math.round(at / 2) * 2;
      const values = buckets.get(bucket) || new Map();
      values.set(series, value);
      buckets.set(bucket, values);
    }
  }
  return [...buckets].sort((a, b) => a[0] - b[0]).map(([at, values]) => [at, [...values.values()].reduce((a, b) => a + b, 0)]);
}

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

export function sparkline() {
  const line = make("path", { class: "line" });
  const element = make("svg", { viewBox: "0 0 120 24", class: "spark", "aria-hidden": "true", preserveAspectRatio: "none" }, line);
  element.show = (points, now) => {
    const top = Math.max(1e-9, ...points.map(([, value]) => value));
    line.setAttribute("d", path(points.map(([at, value]) => [120 - (Math.max(0, now - at) / SPAN) * 120, 22 - (value / top) * 20])));
  };
  return element;
}

function niceTop(value) {
  if (value <= 4) return 4;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((step) => step * unit).find((step) => step >= value);
}

// `span` seconds, with a label every `step` of `unit` seconds. `label` names what is drawn, `suffix` its unit.
export function lineChart(container, { span = SPAN, unit = 60, step = 1, word = "min", label = "Events per second over the last five minutes", suffix = "events/s" } = {}) {
  const area = make("path", { class: "area" });
  const line = make("path", { class: "line" });
  const grid = make("g", { class: "grid" });
  const cursor = make("line", { class: "cursor" });
  const dot = make("circle", { r: 4, class: "cursor-dot" });
  const svg = make("svg", { role: "img" }, grid, area, line, cursor, dot);
  const tip = make("p", { class: "tip", hidden: true });
  const empty = make("p", { class: "chart-empty" }, "Gathering the first seconds …");
  container.append(svg, tip, empty);
  let shown = [];

  function draw(points, now) {
    const width = container.clientWidth, height = container.clientHeight;
    const left = 52, right = 12, top = 10, bottom = 26;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const most = niceTop(Math.max(0, ...points.map(([, value]) => value)));
    const x = (at) => width - right - (Math.max(0, now - at) / span) * (width - left - right);
    const y = (value) => height - bottom - (value / most) * (height - top - bottom);
    grid.replaceChildren();
    for (let step = 0; step <= 4; step++) {
      const at = y((most * step) / 4);
      grid.append(make("line", { x1: left, x2: width - right, y1: at, y2: at }));
      grid.append(make("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, rate((most * step) / 4)));
    }
    const all = span / unit;
    for (let part = 0; part <= all; part += width < 480 ? all / 2 : step) {
      const anchor = part === 0 ? "end" : part === all ? "start" : "middle";
      const text = part === 0 ? "now" : `${rate(part)} ${word}`;
      grid.append(make("text", { x: x(now - part * unit), y: height - 6, "text-anchor": anchor }, text));
    }
    shown = points.filter(([at]) => now - at <= span).map(([at, value]) => [x(at), y(value), at, value]);
    line.setAttribute("d", path(shown));
    const floor = y(0);
    area.setAttribute("d", shown.length ? `${path(shown)}L${shown.at(-1)[0].toFixed(1)} ${floor}L${shown[0][0].toFixed(1)} ${floor}Z` : "");
    empty.hidden = shown.length > 1;
    const last = shown.at(-1);
    svg.setAttribute("aria-label", last ? `${label}; now ${rate(last[3])}` : "No data yet");
  }

  function hide() {
    tip.hidden = true;
    cursor.classList.remove("on");
    dot.classList.remove("on");
  }

  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const nearest = shown.reduce((a, b) => (Math.abs(b[0] - (event.clientX - box.left)) < Math.abs(a[0] - (event.clientX - box.left)) ? b : a), shown[0] || [0]);
    if (nearest.length < 4) return hide();
    const [at, height, moment, value] = nearest;
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, at);
    cursor.setAttribute("y1", 10);
    cursor.setAttribute("y2", container.clientHeight - 26);
    dot.setAttribute("cx", at);
    dot.setAttribute("cy", height);
    cursor.classList.add("on");
    dot.classList.add("on");
    tip.textContent = `${rate(value)} ${suffix} at ${new Date(moment * 1000).toLocaleTimeString()}`;
    tip.hidden = false;
    const half = tip.offsetWidth / 2 + 4;
    tip.style.left = `${Math.min(Math.max(at, half), container.clientWidth - half)}px`;
  });
  return draw;
}
