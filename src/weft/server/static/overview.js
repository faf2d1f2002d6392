// The first page: asks for the overview every two seconds and shows it in place, so that focus and selection stay.

import { Series, lineChart, sparkline, sum } from "./chart.js";
import { Changes } from "./changes.js";
import { count, find, make, plural, rate, say } from "./dom.js";
import { PipelineTable } from "./pipelines.js";
import { me, onMe, poll } from "./status.js";
import { behind } from "./streaming.js";
import { Tail } from "./tail.js";
import { Chip, NameLink, Panel, Time, html, render, to } from "./ui.js";

const series = new Map();
const rows = new Map();
let latest = { streams: [], pipelines: [] };
let now = Date.now() / 1000; // by the server's clock
let asked = false;
// Streaming pipelines and their dead letters: of those who may read everything.
const NOTHING = { streaming: [], letters: [], quarantines: [], silent: [], changes: null, actions: [] };
let more = NOTHING;
let others = null;
let acted = null;

const draw = lineChart(find("chart"));
const standing = (name) => latest.streams.find((stream) => stream.name === name) || { head: 0, floor: 0 };
const tail = new Tail({ list: find("tail"), status: find("tail-status"), select: find("tail-stream"), input: find("tail-where"), button: find("tail-pause") }, standing);

// Shows it until the function that this returns is called.
export function overview() {
  const polled = poll(() => (asked ? "api/v1/overview" : "api/v1/overview?history=true"), show);
  if (tail.stream) tail.open();
  return () => {
    polled.stop();
    leaveMore();
    tail.close();
    asked = false; // what was missed comes with the history
  };
}

// There is another key.
export const reopen = () => tail.stream && tail.open();

// Not with a key that opens some of the streams: these would be refused.
function askForMore() {
  const missing = () => {};
  const add = (found) => {
    more = { ...more, ...found };
    sumUp(); // at once: who is behind is not up to date until the next overview
  };
  others = [
    poll("api/v1/streaming", ({ pipelines }) => add({ streaming: pipelines }), { every: 6000, missing }),
    poll("api/v1/processes", ({ processes }) => add({ silent: processes.filter((each) => !each.lives) }), { every: 10000, missing }),
    poll("api/v1/changes", ({ changes }) => add({ changes }), { every: 30000, missing }),
    poll("api/v1/dead-letters", ({ pipelines, quarantines }) => add({ letters: pipelines, quarantines }), { every: 20000, missing }),
  ];
  const watch = () => {
    if (!me().may_act || acted) return;
    acted = poll("api/v1/audit", ({ actions }) => add({ actions }), { every: 30000, missing });
    others.push(acted);
  };
  others.push({ stop: onMe(watch) });
  watch();
}

function sumUp() {
  tiles(latest);
  render(html`<${Attention} ...${latest} ...${more} />`, find("attention"));
}

function leaveMore() {
  others?.forEach((each) => each.stop());
  others = acted = null;
}

function show(overview) {
  asked = true;
  if (overview.complete && !others) askForMore();
  if (!overview.complete) {
    leaveMore();
    more = NOTHING;
  }
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
  render(html`<${PipelineTable} label="Pipelines" pipelines=${overview.pipelines} now=${now * 1000} />`, find("pipelines"));
  sumUp();
  empty("streams", overview);
  empty("pipelines", overview);
  say(find("streams-note"), overview.complete || !overview.streams.length ? "" : "More streams are hidden: another key may show them.");
  say(find("pipelines-note"), overview.problem || "");
}

function listStreams() {
  const tags = [...new Set(latest.streams.flatMap((stream) => stream.tags))].sort();
  find("tag-field").hidden = !tags.length;
  choices(find("tag"), ["", ...tags], "All");
  const tag = find("tag").value;
  keyed(rows, find("streams"), tag ? latest.streams.filter((stream) => stream.tags.includes(tag)) : latest.streams, streamRow);
}

function chart() {
  const name = find("chart-stream").value;
  draw([{ name: name || "All", points: name ? series.get(name)?.points() || [] : sum([...series.values()]) }], now);
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
  const stored = make("td", { class: "number medium" });
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
    make("th", { scope: "row" }, make("a", { class: "strong", href: to("streams", name) }, name), trouble, rejected, about),
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
    rejected.hidden = !aside(stream);
    say(rejected, aside(stream));
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

const MOST = 6;
const MOST_OPENED = 200;
// A scheduler starts what is due within seconds; a pool that is full may keep it waiting.
const OVERDUE_SECONDS = 300;
// Who has at least so many events to read, and more than come in a minute, does not just read the last ones.
const BEHIND = 1000;
const BEHIND_SECONDS = 60;

const isFailed = ({ status }) => ["failed", "interrupted"].includes(status);

// Views that have no part for each name.
const WHOLE = ["schedule", "processes"];

const Wrong = ({ items }) =>
  items.map(([place, name, kind, word, why, who]) => html`<li key=${[place, name, word, who]}><${NameLink} href=${WHOLE.includes(place) ? to(place) : to(place, name)} name=${name} /> <${Chip} kind=${kind}>${word}<//><span class="note block cut">${why}</span></li>`);

// One line for all, since one cause keeps all of them: nothing starts what is due.
function overdue(late) {
  if (late.length < 2) return late.map((each) => ["pipelines", each.name, "bad", "overdue", html`since <${Time} at=${each.due_since} />: no scheduler started it`]);
  return [["schedule", plural(late.length, "pipeline"), "bad", "overdue", `No scheduler started them: ${late.map((each) => each.name).join(", ")}`]];
}

// What is wrong, and what runs now: each a link to where it is mended.
function Attention({ streams, pipelines, streaming, letters, quarantines, silent, changes, actions }) {
  const late = pipelines.filter((each) => each.due_since && now - new Date(each.due_since) / 1000 > OVERDUE_SECONDS);
  const slow = readers(streams, streaming).filter(isFarBehind).sort((a, b) => b.lag - a.lag);
  const wrong = [
    ...streams.filter((each) => each.problem).map((each) => ["streams", each.name, "bad", "not answering", each.problem]),
    ...pipelines.filter(isFailed).map((each) => ["pipelines", each.name, "bad", each.status, (each.last?.error || "").split("\n")[0]]),
    ...streaming.filter((each) => each.activity?.failure).map((each) => ["streaming", each.name, "bad", "failing", each.activity.failure.error.split("\n")[0]]),
    ...silent.map((each) => ["processes", each.pipeline ?? each.kind, "bad", "silent", html`${each.host}, process ${each.pid}: last heard of <${Time} relative at=${each.heard} now=${now * 1000} />`, `${each.host} ${each.pid}`]),
    ...overdue(late),
    ...slow.map(({ place, name, lag, who, where }) => [place, name, "warn", "behind", `${who}${plural(lag, "event")} behind${where}`, who]),
    ...streams.filter((each) => each.dead_letters || each.quarantined).map((each) => ["streams", each.name, "warn", "rejected", aside(each)]),
    ...letters.filter((each) => each.count).map((each) => ["letters", each.pipeline, "warn", "dead letters", `${count(each.count)}: ${each.groups[0]?.error.split("\n")[0] ?? ""}`]),
    ...quarantines.filter((each) => each.count).map((each) => ["pipelines", each.pipeline, "warn", "quarantined", `${plural(each.count, "row")} in ${each.tables.join(", ")}`]),
    ...streams.flatMap((stream) => stream.consumers.filter((each) => each.lost).map((each) => ["streams", stream.name, "warn", "lost events", `${each.consumer} missed ${count(each.lost)} that retention removed`])),
    ...pipelines.filter((each) => each.state?.endsWith(", stale")).map((each) => ["pipelines", each.name, "warn", "stale", "no success within its freshness"]),
  ];
  const running = [
    ...pipelines.filter((each) => each.status === "running").map((each) => [to("runs", each.last.run_id), each.name, html`since <${Time} at=${each.last.started_at} />`]),
    ...streaming.filter((each) => each.running && !each.activity?.failure).map((each) => [to("streaming", each.name), each.name, `streaming${behind(each) === null ? "" : `, lag ${count(behind(each))}`}`]),
  ];
  if (!wrong.length && !running.length && !changes) return null;
  return html`
    <div class="two">
      ${wrong.length > 0 && html`
        <${Panel} id="wrong-title" title="Needs attention" note=${count(wrong.length)}>
          <ul class="list"><${Wrong} items=${wrong.slice(0, MOST)} /></ul>
          ${wrong.length > MOST && html`<details class="rest"><summary class="note">and ${count(wrong.length - MOST)} more</summary><ul class="list"><${Wrong} items=${wrong.slice(MOST, MOST_OPENED)} /></ul></details>`}
        <//>
      `}
      ${(running.length > 0 || changes) && html`<div class="view">
      ${running.length > 0 && html`
        <${Panel} id="running-title" title="Running now" note=${count(running.length)}>
          <ul class="list">
            ${running.slice(0, MOST).map(([address, name, note]) => html`<li key=${address}><${NameLink} href=${address} name=${name} /> <${Chip} kind="busy">… running<//><span class="note block">${note}</span></li>`)}
            ${running.length > MOST && html`<li class="note">and ${count(running.length - MOST)} more</li>`}
          </ul>
        <//>
      `}
      ${changes && html`<${Changes} changes=${changes} actions=${actions} now=${now * 1000} />`}
      </div>`}
    </div>
  `;
}

// Who reads streams, and how far each is behind: consumers, and streaming pipelines that have run.
function readers(streams, streaming) {
  const consumers = streams.flatMap((stream) =>
    stream.consumers.map(({ consumer, lag }) => ({ place: "streams", name: stream.name, lag, who: `${consumer}: `, where: "", words: `${consumer}, on ${stream.name}`, perSecond: series.get(stream.name)?.now() })),
  );
  const pipelines = streaming
    .filter((each) => (each.committed !== null || each.activity) && behind(each) !== null)
    .map((each) => {
      const where = each.running ? "" : ", not running";
      const perSecond = each.sources.reduce((sum, { name }) => sum + (series.get(name)?.now() ?? 0), 0);
      return { place: "streaming", name: each.name, lag: behind(each), who: "", where, words: each.name + where, perSecond };
    });
  return [...consumers, ...pipelines];
}

const isFarBehind = ({ lag, perSecond }) => lag >= Math.max(BEHIND, (perSecond ?? 0) * BEHIND_SECONDS);

const aside = (stream) => [stream.dead_letters && plural(stream.dead_letters, "dead letter"), stream.quarantined && `${count(stream.quarantined)} quarantined`].filter(Boolean).join(", ");

function tiles({ streams, pipelines, complete }) {
  const rates = streams.map((stream) => series.get(stream.name).now()).filter((value) => value !== null);
  say(find("tile-rate"), rates.length ? rate(rates.reduce((a, b) => a + b, 0)) : "–");
  say(find("tile-rows"), streams.length ? count(streams.reduce((total, stream) => total + stream.rows, 0)) : "–");
  say(find("tile-rows-note"), `in ${plural(streams.length, "stream")}`);
  const [slowest] = readers(streams, more.streaming).sort((a, b) => b.lag - a.lag);
  say(find("tile-lag"), count(slowest?.lag));
  say(find("tile-lag-note"), !slowest ? "no consumers" : slowest.lag ? slowest.words : "every consumer is up to date");
  find("tile-lag").classList.toggle("loud", Boolean(slowest) && isFarBehind(slowest));
  const failing = [...pipelines.filter(isFailed), ...more.streaming.filter((each) => each.activity?.failure)];
  const running = pipelines.filter((pipeline) => pipeline.status === "running");
  const never = pipelines.filter((pipeline) => !pipeline.status);
  const well = never.length === pipelines.length ? "none ran yet" : never.length ? "none failing" : "all well";
  say(find("tile-runs"), failing.length ? `${count(failing.length)} failing` : pipelines.length ? well : "–");
  find("tile-runs").classList.toggle("loud", failing.length > 0);
  const known = [complete ? plural(pipelines.length, "pipeline") : "shown with a key", never.length && never.length < pipelines.length && `${count(never.length)} never ran`, running.length && `${count(running.length)} running`];
  say(find("tile-runs-note"), known.filter(Boolean).join(", "));
}

// What stands where a list has nothing.
const EMPTY = {
  streams: html`<p class="strong">No stream is declared yet.</p><p>Declare one in a module, and start the service with it:</p><pre>${'@weft.stream(fields={"user_id": "string", "action": "string"})\ndef user_events(): ...\n\n$ weft serve --module my_streams'}</pre>`,
  pipelines: html`<p class="strong">No pipeline is declared.</p><p>Pipelines load tables on a schedule; their last runs appear here.</p>`,
};
const HIDDEN = {
  streams: html`<p class="strong">No stream can be read without a credential.</p><p>Give a key with the button Key above.</p>`,
  pipelines: html`<p class="strong">Pipelines are not shown.</p><p>They are for those who may read every stream: give a key with the button Key above.</p>`,
};

function empty(what, { [what]: items, complete }) {
  const place = find(`${what}-empty`);
  place.hidden = items.length > 0;
  place.previousElementSibling.hidden = !items.length;
  render(items.length ? null : (complete ? EMPTY : HIDDEN)[what], place);
}

find("chart-stream").addEventListener("change", chart);
find("tag").addEventListener("change", listStreams);
