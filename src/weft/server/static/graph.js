// The graph: what flows from where to where, laid out by dagre, with the state of each node on it.

import { Graph, layout } from "./dagre.js";
import { count, rate } from "./dom.js";
import { askJson } from "./api.js";
import { Empty, KINDS, MARKS, Title, View, html, to } from "./ui.js";

const WIDTH = 200;
const HEIGHT = 52;
// So many letters fit into a node.
const NAME = 20;
const NOTE = 27;
const WORDS = { stream: "stream", pipeline: "pipeline", model: "model", streaming: "streaming", table: "table", source: "source", target: "target" };
const PLACES = { stream: "streams", pipeline: "pipelines", model: "pipelines", streaming: "streaming" };

export const view = () => html`<${GraphView} />`;

class GraphView extends View {
  every = 3000;
  path = () => "api/v1/overview";

  componentDidMount() {
    super.componentDidMount();
    this.load();
  }

  // The shape changes with the code alone; the state of its nodes is asked for again and again.
  async load() {
    try {
      const [graph, { pipelines }] = await Promise.all([askJson("api/v1/graph"), askJson("api/v1/streaming")]);
      this.setState({ placed: place(graph), streaming: pipelines });
    } catch (error) {
      this.setState({ trouble: error.message });
    }
  }

  show(overview) {
    const { placed, streaming, trouble } = this.state;
    if (!placed) return html`<p class="note" role="status">${trouble || "Loading …"}</p>`;
    const states = standings(overview, streaming, this.before);
    this.before = overview;
    return html`
      <${Title} name="Graph" about="What flows from where to where. A click opens a node." />
      <section class="panel graph">
        ${placed.nodes.length
          ? html`
              <div class="scroll" role="region" aria-label="Graph" tabindex="0">
                <svg width=${placed.width} height=${placed.height} viewBox=${`0 0 ${placed.width} ${placed.height}`} role="group" aria-label="Graph">
                  <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8Z" /></marker></defs>
                  ${placed.edges.map((edge) => html`<path key=${edge.key} class="edge" d=${edge.path} marker-end="url(#arrow)" />`)}
                  ${placed.nodes.map((node) => html`<${Node} key=${node.id} node=${node} state=${states.get(node.id)} />`)}
                </svg>
              </div>
            `
          : html`<${Empty} title="Nothing is declared yet." />`}
      </section>
    `;
  }
}

function Node({ node, state = {} }) {
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const text = [node.kind in PLACES ? WORDS[node.kind] : `${WORDS[node.kind]} in ${node.connection}`, state.text].filter(Boolean).join(" · ");
  const box = html`
    <g class=${`node ${node.kind} ${state.kind || ""}`} transform=${`translate(${node.x - WIDTH / 2} ${node.y - HEIGHT / 2})`}>
      <title>${`${node.name}: ${text}`}</title>
      <rect width=${WIDTH} height=${HEIGHT} rx="8" />
      <rect class="edge-mark" width="4" height=${HEIGHT - 16} x="7" y="8" rx="2" />
      <text x="20" y="22" class="node-name">${cut(node.name, NAME)}</text>
      <text x="20" y="40" class="node-note">${cut(text, NOTE)}</text>
    </g>
  `;
  const place = PLACES[node.kind];
  return place ? html`<a href=${to(place, node.name)} aria-label=${`${node.name}: ${text}`}>${box}</a>` : box;
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
    edges: graph.edges().map((each) => ({ key: `${each.v} ${each.w}`, path: curve(between(graph, each)) })),
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

function standings({ streams, pipelines }, streaming, before) {
  const found = new Map();
  for (const stream of streams) {
    const last = before?.streams.find((each) => each.name === stream.name);
    const perSecond = last && stream.head_at > last.head_at ? (stream.published - last.published) / (stream.head_at - last.head_at) : null;
    const parts = [perSecond === null ? `${count(stream.rows)} events` : `${rate(perSecond)}/s`, stream.lag > 0 && `lag ${count(stream.lag)}`];
    found.set(`stream:${stream.name}`, { kind: stream.problem ? "bad" : stream.dead_letters || stream.quarantined ? "warn" : "", text: parts.filter(Boolean).join(" · ") });
  }
  for (const each of pipelines) {
    const text = each.paused_at ? "paused" : each.status ? `${MARKS[each.status]} ${each.status}` : "never ran";
    found.set(`${each.kind}:${each.name}`, { kind: each.paused_at ? "warn" : KINDS[each.status], text });
  }
  for (const each of streaming) found.set(`streaming:${each.name}`, { kind: each.running ? "good" : "", text: each.running ? "running" : "not running" });
  return found;
}
