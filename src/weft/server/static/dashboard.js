// The first page: asks for the overview every two seconds and shows it in place, so that focus and selection stay.

import { Refused, askJson } from "./api.js";
import { Series, lineChart, sparkline, sum } from "./chart.js";
import { ago, count, duration, find, make, plural, rate, say } from "./dom.js";
import { keyDialog } from "./key.js";
import { Tail } from "./tail.js";

const EVERY = 2000;
const series = new Map();
const rows = { streams: new Map(), pipelines: new Map() };
let latest = { streams: [], pipelines: [] };
let now = Date.now() / 1000; // by the server's clock
let timer;
let asked = false;

const draw = lineChart(find("chart"));
const standing = (name) => latest.streams.find((stream) => stream.name === name) || { head: 0, floor: 0 };
const tail = new Tail(standing);
const askForKey = keyDialog(() => {
  refresh();
  if (tail.stream) tail.open();
});

async function refresh() {
  clearTimeout(timer);
  let pause = EVERY;
  try {
    const overview = await askJson(asked ? "api/v1/overview" : "api/v1/overview?history=true");
    asked = true;
    show(overview);
    live("ok", "Live");
  } catch (error) {
    if (error instanceof Refused) {
      live("bad", "Refused");
      banner(error.message);
      // Not asked again before there is another key: the service counts wrong ones.
      if (error.status === 401) return askForKey(error.message);
      pause = Math.max(pause, (error.retryAfter || 0) * 1000);
    } else {
      live("bad", "Not connected");
      banner("The service does not answer. What is shown is from before; trying again …");
    }
  }
  if (!document.hidden) timer = setTimeout(refresh, pause);
}

function live(kind, text) {
  find("live").className = `live ${kind}`;
  say(find("live-text"), text);
  if (kind === "ok") banner(null);
}

function banner(text) {
  const element = find("banner");
  element.hidden = !text;
  say(element, text || "");
}

function show(overview) {
  latest = overview;
  now = new Date(overview.at) / 1000;
  for (const stream of overview.streams) {
    if (!series.has(stream.name)) series.set(stream.name, new Series());
    for (const [at, published] of stream.history || []) series.get(stream.name).add(at, published);
    if (stream.head_at) series.get(stream.name).add(stream.head_at, stream.published);
  }
  for (const name of series.keys()) if (!standing(name).name) series.delete(name);
  choices(find("chart-stream"), ["", ...series.keys()]);
  const followed = tail.stream;
  choices(find("tail-stream"), [...series.keys()]);
  if (tail.stream && tail.stream !== followed) tail.open();
  find("tail-panel").hidden = find("chart-panel").hidden = !overview.streams.length;
  chart();
  listStreams();
  keyed(rows.pipelines, find("pipelines"), overview.pipelines, pipelineRow);
  tiles(overview);
  empty("streams", overview.streams, overview.complete ? noStreams : hiddenStreams);
  empty("pipelines", overview.pipelines, overview.complete ? noPipelines : hiddenPipelines);
  say(find("streams-note"), overview.complete || !overview.streams.length ? "" : "More streams are hidden: another key may show them.");
  say(find("pipelines-note"), overview.problem || "");
}

function listStreams() {
  const tags = [...new Set(latest.streams.flatMap((stream) => stream.tags))].sort();
  find("tag-field").hidden = !tags.length;
  choices(find("tag"), ["", ...tags], "All");
  const tag = find("tag").value;
  keyed(rows.streams, find("streams"), tag ? latest.streams.filter((stream) => stream.tags.includes(tag)) : latest.streams, streamRow);
}

function chart() {
  const name = find("chart-stream").value;
  draw(name ? series.get(name)?.points() || [] : sum([...series.values()]), now);
}

function choices(select, names, all = "All streams") {
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name || all)));
  if (names.includes(chosen)) select.value = chosen;
}

// Rows by name: those that are there are changed, new ones are added, others go.
function keyed(known, body, items, build) {
  const names = new Set(items.map((item) => item.name));
  for (const [name, row] of known) {
    if (!names.has(name)) {
      row.element.remove();
      known.delete(name);
    }
  }
  items.forEach((item, index) => {
    let row = known.get(item.name);
    if (!row) known.set(item.name, (row = build(item)));
    if (body.children[index] !== row.element) body.insertBefore(row.element, body.children[index] || null);
    row.update(item);
  });
}

function streamRow({ name }) {
  const about = make("span", { class: "note block" });
  const trouble = make("span", { class: "chip bad", hidden: true });
  const rejected = make("span", { class: "chip warn", hidden: true });
  const perSecond = make("td", { class: "number" });
  const spark = sparkline();
  const stored = make("td", { class: "number" });
  const consumers = make("td", { class: "number medium" });
  const lag = make("td", { class: "number" });
  const follow = make("button", { type: "button", class: "quiet", "aria-label": `Follow ${name} live` }, "Follow");
  follow.addEventListener("click", () => {
    tail.open(name);
    find("tail-panel").scrollIntoView({ block: "start" });
    find("tail").focus({ preventScroll: true });
  });
  const element = make(
    "tr",
    {},
    make("th", { scope: "row" }, make("span", { class: "strong" }, name), trouble, rejected, about),
    perSecond,
    make("td", { class: "wide" }, spark),
    stored,
    consumers,
    lag,
    make("td", { class: "end medium" }, follow),
  );
  const update = (stream) => {
    say(about, stream.description || "");
    trouble.hidden = !stream.problem;
    say(trouble, stream.problem || "");
    const aside = [stream.dead_letters && plural(stream.dead_letters, "dead letter"), stream.quarantined && `${count(stream.quarantined)} quarantined`].filter(Boolean);
    rejected.hidden = !aside.length;
    say(rejected, aside.join(", "));
    say(perSecond, rate(series.get(name).now()));
    spark.show(series.get(name).points(), now);
    say(stored, stream.head_at ? count(stream.rows) : "–"); // not read yet
    say(consumers, stream.consumers.length ? count(stream.consumers.length) : "–");
    say(lag, stream.consumers.length ? count(stream.lag) : "–");
    const each = stream.consumers.map((one) => `${one.consumer}: ${count(one.lag)} behind, ${count(one.pending)} not acknowledged`);
    consumers.title = lag.title = each.join("\n");
    lag.classList.toggle("loud", stream.lag > 0);
  };
  return { element, update };
}

const MARKS = { succeeded: "✓", failed: "✕", interrupted: "!", running: "…", cancelled: "⊘", skipped: "–" };
const KINDS = { succeeded: "good", failed: "bad", interrupted: "warn", running: "busy", cancelled: "warn", skipped: "" };

function pipelineRow({ name }) {
  const about = make("span", { class: "note block" });
  const status = make("span", { class: "chip" });
  const when = make("span", { class: "note" });
  const summary = make("summary", {}, "Why");
  const text = make("pre", {});
  const why = make("details", { class: "why", hidden: true }, summary, text);
  const dots = make("td", { class: "wide" });
  const took = make("td", { class: "number medium" });
  const read = make("td", { class: "number medium" });
  const changed = make("td", { class: "number medium" });
  const schedule = make("td", { class: "medium line-up" });
  const element = make(
    "tr",
    {},
    make("th", { scope: "row" }, make("span", { class: "strong" }, name), about),
    make("td", {}, status, " ", when, why),
    dots,
    took,
    read,
    changed,
    schedule,
  );
  const update = (pipeline) => {
    const last = pipeline.last;
    say(about, pipeline.description || pipeline.targets.join(", "));
    say(status, pipeline.status ? `${MARKS[pipeline.status]} ${pipeline.status}` : "never ran");
    status.className = `chip ${KINDS[pipeline.status] || ""}`;
    const aside = last?.quarantined ? `, ${count(last.quarantined)} quarantined` : "";
    say(when, last ? ago(last.started_at, now * 1000) + aside : "");
    why.hidden = !last?.error;
    say(text, last?.error || "");
    say(took, duration(last?.seconds));
    say(read, count(last?.rows_read));
    say(changed, last ? count((last.inserted || 0) + (last.updated || 0) + (last.deleted || 0)) : "–");
    say(schedule, pipeline.schedule || "by hand");
    schedule.title = pipeline.state || "";
    const shown = pipeline.runs.map((run) => `${run.status} ${run.started_at}`).join("\n");
    if (dots.dataset.shown !== shown) {
      dots.dataset.shown = shown;
      dots.replaceChildren(
        make(
          "span",
          { class: "dots", role: "img", "aria-label": `The last runs, the newest last: ${pipeline.runs.map((run) => run.status).join(", ") || "none"}` },
          ...pipeline.runs.map((run) => make("span", { class: `run ${KINDS[run.status]}`, title: `${run.status}, ${new Date(run.started_at).toLocaleString()}, ${duration(run.seconds)}` }, MARKS[run.status])),
        ),
      );
    }
  };
  return { element, update };
}

function tiles({ streams, pipelines, complete }) {
  const rates = streams.map((stream) => series.get(stream.name).now()).filter((value) => value !== null);
  say(find("tile-rate"), rates.length ? rate(rates.reduce((a, b) => a + b, 0)) : "–");
  say(find("tile-rows"), streams.length ? count(streams.reduce((total, stream) => total + stream.rows, 0)) : "–");
  say(find("tile-rows-note"), `in ${plural(streams.length, "stream")}`);
  const behind = streams.filter((stream) => stream.consumers.length).sort((a, b) => b.lag - a.lag)[0];
  say(find("tile-lag"), behind ? count(behind.lag) : "–");
  say(find("tile-lag-note"), !behind ? "no consumers" : behind.lag ? `on ${behind.name}` : "every consumer is up to date");
  const failing = pipelines.filter((pipeline) => ["failed", "interrupted"].includes(pipeline.status));
  const running = pipelines.filter((pipeline) => pipeline.status === "running");
  say(find("tile-runs"), pipelines.length ? (failing.length ? `${count(failing.length)} failing` : "all well") : "–");
  find("tile-runs").classList.toggle("loud", failing.length > 0);
  const known = complete ? plural(pipelines.length, "pipeline") : "shown with a key";
  say(find("tile-runs-note"), `${known}${running.length ? `, ${count(running.length)} running` : ""}`);
}

function empty(what, items, build) {
  const place = find(`${what}-empty`);
  place.hidden = items.length > 0;
  place.previousElementSibling.hidden = items.length === 0;
  if (items.length) place.replaceChildren();
  else if (place.dataset.kind !== build.name || !place.children.length) {
    place.dataset.kind = build.name;
    place.replaceChildren(...build());
  }
}

function noStreams() {
  return [
    make("p", { class: "strong" }, "No stream is declared yet."),
    make("p", {}, "Declare one in a module, and start the service with it:"),
    make("pre", {}, '@weft.stream(fields={"user_id": "string", "action": "string"})\ndef user_events(): ...\n\n$ weft serve --module my_streams'),
  ];
}

function hiddenStreams() {
  return [make("p", { class: "strong" }, "No stream can be read without a credential."), make("p", {}, "Give a key with the button Key above.")];
}

function noPipelines() {
  return [make("p", { class: "strong" }, "No pipeline is declared."), make("p", {}, "Pipelines load tables on a schedule; their last runs appear here.")];
}

function hiddenPipelines() {
  return [make("p", { class: "strong" }, "Pipelines are not shown."), make("p", {}, "They are for those who may read every stream: give a key with the button Key above.")];
}

find("chart-stream").addEventListener("change", chart);
find("tag").addEventListener("change", listStreams);
addEventListener("resize", chart);
// A page that nobody looks at asks for nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
refresh();
