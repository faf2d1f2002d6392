// The page: its views by address (`#/pipelines/nightly`), so that each can be sent to a colleague.

import { Audit } from "./audit.js";
import { find } from "./dom.js";
import { keyDialog } from "./key.js";
import { overview, reopen } from "./overview.js";
import { DeadLetters, Letter, PipelineLetters } from "./letters.js";
import { Pipeline, Pipelines, Run } from "./pipelines.js";
import { Processes } from "./processes.js";
import { Schedule } from "./schedule.js";
import { banner, keyAskedBy, noticesShownBy, refreshAll } from "./status.js";
import { StreamView } from "./stream.js";
import { StreamingPipeline, StreamingPipelines } from "./streaming.js";
import { Notices, html, render } from "./ui.js";

// By the first part of an address: the view, and the properties that the other parts are.
const VIEWS = {
  streams: { one: (name) => html`<${StreamView} key=${name} name=${name} />`, under: "" },
  pipelines: { all: () => html`<${Pipelines} />`, one: (name) => html`<${Pipeline} key=${name} name=${name} />` },
  runs: { one: (id) => html`<${Run} key=${id} id=${id} />`, under: "pipelines" },
  streaming: { all: () => html`<${StreamingPipelines} />`, one: (name) => html`<${StreamingPipeline} key=${name} name=${name} />` },
  letters: {
    all: () => html`<${DeadLetters} />`,
    one: (name, id) => (id ? html`<${Letter} key=${`${name} ${id}`} name=${name} id=${id} />` : html`<${PipelineLetters} key=${name} name=${name} />`),
  },
  audit: { all: () => html`<${Audit} />`, one: (object) => html`<${Audit} key=${object} object=${object} />` },
  schedule: { all: () => html`<${Schedule} />` },
  processes: { all: () => html`<${Processes} />` },
  // Its library is the largest file of the page.
  graph: { all: async () => (await import("./graph.js")).view(), one: async (model) => (await import("./graph.js")).view(model) },
};

let stop = null; // of the overview, while it is shown
let shown = null;

function parts() {
  try {
    return location.hash.slice(2).split("/").map(decodeURIComponent);
  } catch {
    return [""]; // half of an escape
  }
}

async function go() {
  const [kind, name, part] = parts();
  const view = VIEWS[kind];
  const build = name ? view?.one : view?.all;
  const address = build ? location.hash : "#/";
  if (address === shown) return;
  const isFirst = shown === null;
  shown = address;
  banner();
  stop?.();
  stop = null;
  find("overview").hidden = Boolean(build);
  find("view").hidden = !build;
  const under = build ? (view.under ?? kind) : "";
  for (const link of find("views").querySelectorAll("a[data-view]")) {
    if (link.dataset.view === under) {
      link.setAttribute("aria-current", "page");
      find("views").scrollLeft = link.offsetLeft - find("views").offsetLeft - 40; // on a narrow screen not all of them are seen
    } else link.removeAttribute("aria-current");
  }
  document.title = build ? `${part || name || kind} · Weft` : "Weft";
  const content = build ? await build(name, part) : null;
  if (address !== shown) return; // another one was chosen meanwhile
  render(content, find("view"));
  if (!build) stop = overview();
  if (!isFirst) {
    scrollTo(0, 0);
    find("main").focus({ preventScroll: true });
  }
}

keyAskedBy(
  keyDialog(() => {
    refreshAll();
    if (stop) reopen();
  }),
);
// Not by its address, which names the view.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  find("main").focus();
});
noticesShownBy((notices) => render(html`<${Notices} notices=${notices} />`, find("notices")));
addEventListener("hashchange", go);
go();
