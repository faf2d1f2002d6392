// Follows a stream by EventSource. What was shown last is remembered, so that nothing is missed after a break.

import { address, askJson, key, parseJson } from "./api.js";
import { count, make, plural, say } from "./dom.js";

const SHOWN = 200;
// More rows take longer than a frame of 16 ms, where a machine stood still for a while; the others come with the next ones.
const DRAWN_A_FRAME = 16;
// Made once: toLocaleTimeString makes one for each call.
const clock = new Intl.DateTimeFormat(undefined, { hour: "numeric", minute: "numeric", second: "numeric" });
const MOST_PAUSE = 10_000;
// So many of the last events are looked through for those that a filter wants.
const FILTERED = 10_000;

export class Tail {
  // `elements`: list, status, input (the filter) and button (pause); and select, if the stream can be chosen. `standing` returns the last known state of
  // a stream.
  constructor(elements, standing, name = "") {
    Object.assign(this, elements, { standing, name });
    this.waiting = [];
    this.paused = false;
    this.source = null;
    this.generation = 0;
    this.select?.addEventListener("change", () => this.open());
    // It also changes when it is left, long after its value was used.
    this.input.addEventListener("change", () => this.where === this.input.value.trim() || this.open());
    this.input.form.addEventListener("submit", (event) => event.preventDefault());
    this.button.addEventListener("click", () => this.pause(!this.paused));
  }

  get stream() {
    return this.select ? this.select.value : this.name;
  }

  open(stream) {
    this.close();
    if (stream) this.select.value = stream;
    this.list.replaceChildren();
    this.waiting = [];
    this.last = null;
    this.pauseFor = 1000;
    this.pause(false);
    this.connect();
  }

  close() {
    this.generation++;
    this.source?.close();
    this.source = null;
    clearTimeout(this.again);
  }

  async connect() {
    this.close();
    const generation = this.generation;
    const name = this.stream;
    if (!name) return;
    say(this.status, `Connecting to ${name} …`);
    const url = address(`api/v1/streams/${encodeURIComponent(name)}/subscribe`);
    const { tail } = this.standing(name);
    const where = (this.where = this.input.value.trim());
    if (where && where.indexOf("=") < 1) return say(this.status, "Only where needs a field and its value, such as action=click.");
    url.searchParams.set("since", this.last ?? (where ? -FILTERED : tail));
    if (where) url.searchParams.set("where", where);
    try {
      // An EventSource cannot send a key: it brings a ticket, which is good once.
      if (key()) {
        const { ticket } = await askJson(`api/v1/streams/${encodeURIComponent(name)}/ticket`, { method: "POST" });
        url.searchParams.set("ticket", ticket);
      } else if (where || this.last === null) {
        // It does not report why it was refused either.
        await askJson(`api/v1/streams/${encodeURIComponent(name)}/events?limit=1&after=${tail}`);
      }
    } catch (error) {
      if (generation !== this.generation) return;
      // Another key opens it again; to come back with the same one would only be counted.
      if (error.status === 401) return say(this.status, error.message);
      return this.retry(error.message);
    }
    if (generation !== this.generation) return;
    const source = (this.source = new EventSource(url));
    source.onopen = () => {
      this.pauseFor = 1000;
      this.showStatus();
    };
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) this.retry("The subscription ended.");
      else say(this.status, `The connection to ${name} was lost; connecting again …`);
    };
    source.addEventListener("stream.event", (event) => this.take(event));
    source.addEventListener("stream.lost", (event) => this.take(event));
    source.addEventListener("stream.rewound", (event) => this.take(event));
  }

  retry(why) {
    this.close();
    say(this.status, `${why} Trying again …`);
    this.again = setTimeout(() => this.connect(), this.pauseFor);
    this.pauseFor = Math.min(this.pauseFor * 2, MOST_PAUSE);
  }

  take(event) {
    this.last = event.lastEventId;
    this.waiting.push(event);
    // More than are shown are never held.
    if (this.waiting.length > SHOWN) this.waiting.shift();
    this.drawSoon();
  }

  drawSoon() {
    if (!this.paused && !this.drawing) this.drawing = requestAnimationFrame(() => this.draw());
  }

  pause(paused) {
    this.paused = paused;
    this.button.setAttribute("aria-pressed", paused);
    say(this.button, paused ? "Resume" : "Pause");
    if (!paused) this.draw();
    this.showStatus();
  }

  draw() {
    this.drawing = null;
    const rows = this.waiting.splice(0, DRAWN_A_FRAME).map(row).reverse();
    this.list.prepend(...rows);
    while (this.list.children.length > SHOWN) this.list.lastChild.remove();
    if (this.waiting.length) this.drawSoon();
    this.showStatus();
  }

  showStatus() {
    if (!this.source || this.source.readyState !== EventSource.OPEN) return;
    const shown = this.list.children.length;
    if (this.paused) say(this.status, "Paused. New events are kept for when you resume, the last 200 of them.");
    else if (this.where && !shown) say(this.status, `Following ${this.stream}. None of the last ${count(FILTERED)} events has ${this.where}. Waiting for one …`);
    else say(this.status, shown ? `Following ${this.stream}. ${plural(shown, "event")} shown, the newest first.` : `Following ${this.stream}. Waiting for its first event …`);
  }
}

function row(message) {
  const data = parseJson(message.data);
  if (message.type === "stream.lost") {
    return make("li", { class: "lost" }, `${plural(data.lost, "event")} before ${BigInt(data.resumed_after_text) + 1n} were removed by retention.`);
  }
  if (message.type === "stream.rewound") {
    return make("li", { class: "lost" }, `The stream went back to ${data.resumed_after_text}: an older state of it was restored.`);
  }
  const event = { ...data.event };
  const at = new Date(event._weft_published_at);
  for (const name of Object.keys(event)) if (name.startsWith("_weft_")) delete event[name];
  // A stream has a column for every field that ever came: those that this event lacks would hide the ones it has.
  const present = Object.entries(event).filter(([, value]) => value !== null);
  const fields = present.flatMap(([name, value]) => [
    make("span", { class: "name" }, name),
    make("span", { class: "value" }, typeof value === "string" ? value : JSON.stringify(value)),
  ]);
  // All of it when somebody looks: at hundreds a second few are looked at.
  const all = make("pre");
  const ontoggle = () => say(all, JSON.stringify(data.event, null, 2));
  return make(
    "li",
    {},
    make(
      "details",
      { ontoggle },
      make(
        "summary",
        {},
        make("time", { datetime: at.toISOString() }, clock.format(at)),
        make("span", { class: "offset" }, message.lastEventId),
        make("span", { class: "fields" }, ...fields),
      ),
      all,
    ),
  );
}
