// Lines over time: small ones drawn as SVG, charts by uPlot.

import { briefDuration, compact, make, rate, utc } from "./dom.js";
import { Component, html } from "./ui.js";

export const SPAN = 300; // seconds

// How much a stream had published over time, and the rates between.
export class Series {
  constructor() {
    this.seen = [];
  }

  add(at, published) {
    const last = this.seen.at(-1);
    // Several processes answer in turn; one may have looked before another. Less than a second is too little for a rate.
    if (last && at < last[0] + 1) return;
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

// Samples are ten seconds apart at most; a value counts until the next one.
const KEPT = 12;

// The sum of several, at the moments of the one that was looked at last.
export function sum(all) {
  const buckets = new Map();
  for (const series of all) {
    for (const [at, value] of series.points()) {
      const bucket = Math.round(at / 2) * 2;
      if (!buckets.has(bucket)) buckets.set(bucket, []);
      buckets.get(bucket).push([series, value]);
    }
  }
  const last = new Map();
  return [...buckets].sort((a, b) => a[0] - b[0]).map(([at, values]) => {
    for (const [series, value] of values) last.set(series, [at, value]);
    return [at, [...last.values()].reduce((total, [seen, value]) => total + (at - seen <= KEPT ? value : 0), 0)];
  });
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

let library = null;

// It is loaded with the first chart: no view waits for it. Its file is a script, not a module.
function uPlot() {
  library ??= new Promise((loaded, failed) => {
    document.head.append(make("link", { rel: "stylesheet", href: "static/uplot.css" }));
    const script = make("script", { src: "static/uplot.js" });
    script.onload = () => loaded(globalThis.uPlot);
    script.onerror = () => {
      library = null; // the next chart tries again
      failed(new TypeError("static/uplot.js"));
    };
    document.head.append(script);
  });
  return library;
}

const DAY = 86400;
// A day of which the first minutes are known begins with these: they would be a few pixels.
const LEAST_SPAN = 600;
// Steps between the marks of an axis that read well: 1, 2, 5, 10 … and of durations what clocks have.
const NUMBERS = Array.from({ length: 48 }, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3));
const DURATIONS = [
  ...[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30],
  ...[1, 2, 5, 10, 20, 30].map((minutes) => minutes * 60),
  ...[1, 2, 3, 6, 12].map((hours) => hours * 3600),
  ...NUMBERS.slice(0, 12).map((days) => days * DAY),
];
const COLORS = ["--accent", "--warn", "--good"];
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const clockSeconds = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

// Several lines as uPlot wants them: all moments once, and of each line its value there or none.
function aligned(lines) {
  const places = new Map();
  for (const { points } of lines) for (const [at] of points) places.set(at, 0);
  const moments = [...places.keys()].sort((a, b) => a - b);
  moments.forEach((at, index) => places.set(at, index));
  return [moments, ...lines.map(({ points }) => {
    const values = new Array(moments.length); // undefined: uPlot draws on to the next; null would be a gap
    for (const [at, value] of points) values[places.get(at)] = value;
    return values;
  })];
}

// `draw(lines, now)`: lines are [{name, points: [[at, value]]}], over the last `span` seconds. `say` writes a value, `tick`
// one on the axis, which reaches to `least` at least, and `label` names what is drawn. Drag to look at a part of it, double-click to see all again.
export function lineChart(container, { span = SPAN, label = "Events per second over the last five minutes", say = (value) => `${rate(value)} events/s`, tick = compact, least = 4, nothing = "Gathering the first seconds …" } = {}) {
  const box = make("div", { class: "plot", role: "img" });
  const tip = make("p", { class: "tip", hidden: true });
  const empty = make("p", { class: "chart-empty" }, nothing);
  container.append(box, tip, empty);
  const color = (name) => getComputedStyle(container).getPropertyValue(name).trim();
  const size = () => ({ width: Math.max(120, container.clientWidth - 12), height: Math.max(60, container.clientHeight - 8) });
  let plot = null, shown = [], now = 0, zoomed = false, closed = false;

  function options() {
    const text = { stroke: () => color("--muted"), font: "12px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: () => color("--edge"), width: 1 };
    return {
      ...size(),
      padding: [12, 24, 0, 0],
      legend: { show: false },
      cursor: { points: { size: 8, width: 2, stroke: () => color("--surface"), fill: (_, index) => color(COLORS[index - 1]) }, drag: { x: true, y: false, dist: 8 }, y: false },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(least, (high || 0) * 1.08)] } },
      axes: [
        { ...text, grid: { show: false }, size: 32, gap: 9, space: 90, values: (_, marks, __, ___, step) => marks.map((at) => (step < 60 ? clockSeconds : clock).format(at * 1000)) },
        { ...text, grid, size: 56, space: 44, incrs: tick === briefDuration ? DURATIONS : NUMBERS, values: (_, marks) => marks.map((mark) => tick(mark)) },
      ],
      series: [{}, ...shown.map((_, index) => ({ width: 2, points: { size: 6, show: (plot, index) => plot.data[index].filter((value) => value != null).length === 1 }, stroke: () => color(COLORS[index]), fill: () => (shown.length === 1 ? color("--area") : "transparent") }))],
      hooks: { setCursor: [hover], setSelect: [() => (zoomed = true)] },
    };
  }

  function hover({ cursor: { idx, left }, data }) {
    const values = idx == null || left < 0 ? [] : shown.map(({ name }, index) => [name, data[index + 1][idx]]).filter(([, value]) => value != null);
    tip.hidden = !values.length;
    if (!values.length) return;
    const moment = new Date(data[0][idx] * 1000);
    const when = span > DAY / 24 ? `${moment.toLocaleDateString(undefined, { day: "numeric", month: "short" })} ${clock.format(moment)}` : clockSeconds.format(moment);
    tip.textContent = `${values.map(([name, value]) => (shown.length > 1 ? `${name} ${say(value)}` : say(value))).join(" · ")} at ${when}${moment.getTimezoneOffset() ? `, ${utc(moment).slice(11)}` : ""}`;
    const half = tip.offsetWidth / 2 + 4;
    tip.style.left = `${Math.min(Math.max(left + 56, half), container.clientWidth - half)}px`;
  }

  function update() {
    if (!plot || closed) return;
    plot.batch(() => {
      plot.setData(aligned(shown), false);
      if (zoomed) plot.redraw();
      else plot.setScale("x", { min: Math.max(now - span, Math.min(now - LEAST_SPAN, ...shown.flatMap(({ points }) => points.slice(0, 1).map(([at]) => at)))), max: now });
    });
  }

  async function draw(lines, at) {
    const count = shown.length;
    shown = lines.map((line) => ({ ...line, points: line.points.filter(([moment]) => at - moment <= span) }));
    now = at;
    empty.hidden = shown.some(({ points }) => points.length);
    const said = shown.filter(({ points }) => points.length).map(({ name, points }) => `${shown.length > 1 ? `${name} ` : ""}${say(points.at(-1)[1])}`);
    box.setAttribute("aria-label", said.length ? `${label}; now ${said.join(", ")}` : `${label}: no data yet`);
    if (plot && count !== shown.length) {
      plot.destroy();
      plot = null;
    }
    if (!plot) {
      const Plot = await uPlot().catch(() => null); // the page says that the service is away
      if (!Plot || plot || closed) return;
      plot = new Plot(options(), aligned(shown), box);
      plot.over.addEventListener("dblclick", () => {
        zoomed = false;
        update();
      });
    }
    update();
  }

  const resized = new ResizeObserver(() => plot?.setSize(size()));
  resized.observe(container);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const recolor = () => plot?.redraw(false, true);
  scheme.addEventListener("change", recolor);
  draw.close = () => {
    closed = true;
    resized.disconnect();
    scheme.removeEventListener("change", recolor);
    plot?.destroy();
  };
  return draw;
}

// Lines over time, for views, with a title. Those of several have names, with their colors next to these.
export class Chart extends Component {
  componentDidMount() {
    this.draw = lineChart(this.element, this.props);
    this.draw(this.props.lines, this.props.now);
  }

  componentDidUpdate() {
    this.draw(this.props.lines, this.props.now);
  }

  componentWillUnmount() {
    this.draw.close();
  }

  render({ lines, low, title }) {
    return html`
      <figure>
        <figcaption class="sub">
          <h3>${title}</h3>
          ${lines.length > 1 && html`<p class="names">${lines.map(({ name }, index) => html`<span key=${name} class=${`name-${index}`}>${name}</span>`)}</p>`}
        </figcaption>
        <div class=${`chart ${low ? "low" : ""}`} ref=${(element) => (this.element = element)}></div>
      </figure>
    `;
  }
}

// Of two counts that only grow, how much a second; a count that began anew is no rate.
export function rates(points) {
  return points.slice(1).flatMap(([at, value], index) => {
    const [before, last] = points[index];
    return value == null || last == null || value < last ? [] : [[at, (value - last) / Math.max(1, at - before)]];
  });
}

export const SPAN_DAY = DAY;
