// The graph: what flows from where to where, laid out by dagre, with the state of each node on it.

import { Graph, layout } from "./dagre.js";
import { ago, count, plural, rate } from "./dom.js";
import { askJson } from "./api.js";
import { Columns } from "./models.js";
import { behind } from "./streaming.js";
import { Empty, KINDS, Loading, MARKS, Panel, Title, View, html, to } from "./ui.js";

const WIDTH = 244;
const HEIGHT = 52;
// Where the texts of a node begin, and what is left free behind them.
const TEXT = 20;
const MARGIN = 10;
// A model has a link in its upper right corner.
const COLUMNS = 24;
const PLACES = { stream: "streams", pipeline: "pipelines", model: "pipelines", streaming: "streaming" };

// With the columns of a model, where one is named.
export const view = (model) => html`<${GraphView} model=${model} />`;

class GraphView extends View {
  every = 3000;
  path = () => "api/v1/overview";

  componentDidMount() {
    super.componentDidMount();
    this.load();
    const show = ({ pipelines }) => this.setState(({ streaming }) => ({ streaming: pipelines, streamingBefore: streaming }));
    this.also("api/v1/streaming", show, 6000);
  }

  // The shape changes with the code alone; the state of its nodes is asked for again and again.
  async load() {
    try {
      this.setState({ placed: place(await askJson("api/v1/graph")) });
    } catch (error) {
      this.setState({ trouble: error.message });
    }
  }

  show(overview) {
    const { placed, streaming = [], streamingBefore = [], trouble } = this.state;
    if (!placed) return html`<${Loading} text=${trouble} />`;
    // Each answer once: a view that is drawn again for another reason has no new rates.
    if (this.overview !== overview) [this.before, this.overview] = [this.overview, overview];
    const states = standings(overview, streaming, this.before, streamingBefore);
    fresh(placed, states, new Date(overview.at));
    const { model } = this.props;
    const before = model ? upstream(placed, `model:${model}`) : new Set();
    return html`
      <${Title} name="Graph" about="What flows from where to where. A click opens a node; the lines in the corner of a model show where its columns come from." />
      ${model && html`<${Lineage} key=${model} name=${model} />`}
      <section class="panel graph">
        ${placed.nodes.length
          ? html`
              <div class="scroll" role="group" aria-label="Graph" tabindex="0">
                <svg width=${placed.width} height=${placed.height} viewBox=${`0 0 ${placed.width} ${placed.height}`} role="group" aria-label="Graph">
                  <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8Z" /></marker></defs>
                  ${placed.edges.map((edge) => html`<path key=${edge.key} class=${`edge ${before.has(edge.to) ? "chosen" : ""}`} d=${edge.path} marker-end="url(#arrow)" />`)}
                  ${placed.nodes.map((node) => html`<${Node} key=${node.id} node=${node} state=${states.get(node.id)} chosen=${before.has(node.id)} />`)}
                </svg>
              </div>
            `
          : html`<${Empty} title="Nothing is declared yet." />`}
      </section>
    `;
  }
}

// A node with all that flows into it.
function upstream({ edges }, id) {
  const found = new Set([id]);
  for (const each of found) for (const edge of edges) if (edge.to === each) found.add(edge.from);
  return found;
}

class Lineage extends View {
  every = 10000;
  path = () => `api/v1/models/${encodeURIComponent(this.props.name)}`;

  // It is a part of a view, which has the heading.
  render({ name }, { data, missing }) {
    return html`
      <${Panel} id="columns" title=${`Columns of ${name} and where they come from`} note=${html`<a href=${to("graph")}>Close</a>`}>
        ${data && !missing ? html`<${Columns} model=${data} />` : html`<p class="foot note" role="status">${missing ? `${missing.message} ${missing.hint || ""}` : "Loading …"}</p>`}
      <//>
    `;
  }
}

const pen = document.createElement("canvas").getContext("2d");
const shown = new Map();

// As much of a text as has room.
function cut(text, font, room) {
  const key = `${font} ${room} ${text}`;
  if (shown.has(key)) return shown.get(key);
  if (shown.size > 5000) shown.clear();
  pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  let [part, most] = [text, text.length];
  while (part.length > 1 && pen.measureText(part).width > room) part = `${text.slice(0, (most -= Math.ceil(most / 40)))}…`;
  shown.set(key, part);
  return part;
}

function Node({ node, state = {}, chosen }) {
  const text = [node.kind in PLACES || state.text ? node.kind : `${node.kind} in ${node.connection}`, state.text].filter(Boolean).join(" · ");
  const note = cut(text, "11.5px", WIDTH - TEXT - MARGIN);
  const box = html`
    <g class=${`node ${node.kind} ${state.kind || ""} ${chosen ? "chosen" : ""}`} transform=${`translate(${node.x - WIDTH / 2} ${node.y - HEIGHT / 2})`}>
      <title>${`${node.name}: ${text}`}</title>
      <rect width=${WIDTH} height=${HEIGHT} rx="8" />
      <rect class="edge-mark" width="4" height=${HEIGHT - 16} x="7" y="8" rx="2" />
      <text x=${TEXT} y="22" class="node-name">${cut(node.name, "600 13.5px", WIDTH - TEXT - MARGIN - (node.kind === "model" ? COLUMNS : 0))}</text>
      <text x=${TEXT} y="40" class="node-note">${note === text || !state.text ? note : cut(state.text, "11.5px", WIDTH - TEXT - MARGIN)}</text>
    </g>
  `;
  const place = PLACES[node.kind];
  return html`
    ${place ? html`<a href=${to(place, node.name)}>${box}</a>` : box}
    ${node.kind === "model" && html`
      <a class="columns" href=${to("graph", node.name)} aria-label=${`Columns of ${node.name}`}>
        <g transform=${`translate(${node.x + WIDTH / 2 - COLUMNS - 5} ${node.y - HEIGHT / 2 + 5})`}>
          <title>Where its columns come from</title>
          <rect width=${COLUMNS} height=${COLUMNS} rx="5" />
          <path d="M7 8h10M7 12h10M7 16h10" />
        </g>
      </a>
    `}
  `;
}

function place({ nodes, edges }) {
  const graph = new Graph({ multigraph: false });
  graph.setGraph({ rankdir: "LR", nodesep: 18, ranksep: 64, marginx: 18, marginy: 18 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const node of nodes) graph.setNode(node.id, { ...node, width: WIDTH, height: HEIGHT });
  for (const edge of edges) graph.setEdge(edge.from, edge.to);
  if (nodes.length) layout(graph);
  const { width = 0, height = 0 } = graph.graph();
  return {
    width: Math.ceil(width),
    height: Math.ceil(height),
    nodes: nodes.map((node) => ({ ...node, x: graph.node(node.id).x, y: graph.node(node.id).y })),
    edges: graph.edges().map((each) => ({ key: `${each.v} ${each.w}`, from: each.v, to: each.w, path: curve(between(graph, each)) })),
  };
}

// From the right of one node to the left of the other; past those between them, as the layout has it.
function between(graph, edge) {
  const [start, end] = [graph.node(edge.v), graph.node(edge.w)];
  const middle = graph.edge(edge).points.slice(1, -1).filter((point) => point.x > start.x + WIDTH / 2 + 40 && point.x < end.x - WIDTH / 2 - 40);
  return [{ x: start.x + WIDTH / 2, y: start.y }, ...middle, { x: end.x - WIDTH / 2, y: end.y }];
}

// Through the points, without corners.
function curve(points) {
  const [first, ...rest] = points;
  let text = `M${first.x} ${first.y}`;
  let last = first;
  for (const point of rest) {
    const middle = (last.x + point.x) / 2;
    text += `C${middle} ${last.y} ${middle} ${point.y} ${point.x} ${point.y}`;
    last = point;
  }
  return text;
}

function standings({ streams, pipelines, at }, streaming, before, streamingBefore) {
  const found = new Map();
  for (const stream of streams) {
    const last = before?.streams.find((each) => each.name === stream.name);
    const perSecond = last && stream.head_at > last.head_at ? (stream.published - last.published) / (stream.head_at - last.head_at) : null;
    const parts = [perSecond === null ? plural(stream.rows, "event") : `${rate(perSecond)}/s`, stream.lag > 0 && `lag ${count(stream.lag)}`];
    found.set(`stream:${stream.name}`, { kind: stream.problem ? "bad" : stream.dead_letters || stream.quarantined ? "warn" : "", text: parts.filter(Boolean).join(" · ") });
  }
  for (const each of pipelines) {
    const status = each.paused_at ? "paused" : each.status === "succeeded" ? null : each.status ? `${MARKS[each.status]} ${each.status}` : "never ran";
    const freshness = each.succeeded_at && (status ? ago(each.succeeded_at, new Date(at)) : `✓ ${ago(each.succeeded_at, new Date(at))}`);
    found.set(`${each.kind}:${each.name}`, { kind: each.paused_at ? "warn" : KINDS[each.status], at: each.succeeded_at, text: [status, freshness].filter(Boolean).join(" · ") });
  }
  for (const each of streaming) {
    const [now, last] = [each.activity, streamingBefore.find(({ name }) => name === each.name)?.activity];
    const seconds = now && last ? (new Date(now.at) - new Date(last.at)) / 1000 : 0;
    const perSecond = seconds > 0 && now.rows_in >= last.rows_in ? `${rate((now.rows_in - last.rows_in) / seconds)} rows/s` : null;
    const lag = behind(each);
    const failed = Boolean(each.activity?.failure);
    const stands = failed ? "✕ failing" : each.running ? (perSecond ?? "running") : "not running";
    const parts = [stands, lag > 0 && `lag ${count(lag)}`];
    found.set(`streaming:${each.name}`, { kind: failed ? "bad" : each.running ? "good" : each.committed !== null && lag > 0 ? "warn" : "", at: each.last_batch, text: parts.filter(Boolean).join(" · ") });
  }
  return found;
}

// A table is as fresh as the last that was written into it.
function fresh({ edges, nodes }, states, now) {
  for (const node of nodes) {
    if (node.kind !== "table" && node.kind !== "target") continue;
    const written = edges.filter((edge) => edge.to === node.id).map((edge) => states.get(edge.from)?.at).filter(Boolean).sort();
    if (written.length) states.set(node.id, { text: ago(written.at(-1), now) });
  }
}
