// Follows a stream by EventSource. What was shown last is remembered, so that nothing is missed after a break.

import { address, askJson, key, parseJson } from "./api.js";
import { count, make, plural, say, utc } from "./dom.js";

const SHOWN = 100;
// Nobody reads faster, and each time costs style, layout and paint, however few rows are new.
const DRAWN_EVERY_MS = 40;
// More rows take longer than a frame of 16 ms, where a machine stood still for a while; the others come with the next ones.
const DRAWN_AT_ONCE = 32;
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
    this.list.addEventListener("pointerover", ({ target }) => target.dateTime && (target.title = utc(target.dateTime)));
    this.list.addEventListener("click", ({ target }) => target.closest("button") && toggle(target.closest("li")));
  }

  get stream() {
    return this.select ? this.select.value : this.name;
  }

  open(stream) {
    this.close();
    if (stream) this.select.value = stream;
    this.list.replaceChildren();
    this.waiting = [];
    this.skipped = 0;
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
    if (this.waiting.length > SHOWN) {
      this.waiting.shift();
      this.skipped++;
    }
    this.drawSoon();
  }

  drawSoon() {
    if (this.paused || this.drawing) return;
    this.drawing = true;
    setTimeout(() => requestAnimationFrame(() => this.draw()), DRAWN_EVERY_MS);
  }

  pause(paused) {
    this.paused = paused;
    this.button.setAttribute("aria-pressed", paused);
    say(this.button, paused ? "Resume" : "Pause");
    if (!paused) this.draw();
    this.showStatus();
  }

  draw() {
    this.drawing = false;
    if (this.paused) return;
    const taken = this.waiting.splice(0, DRAWN_AT_ONCE);
    const rows = taken.map((message) => (message.type === "stream.event" ? filled(this.spare(taken.length), message) : lost(message)));
    this.list.prepend(...rows.reverse());
    while (this.list.children.length > SHOWN) this.list.lastChild.remove();
    if (this.waiting.length) this.drawSoon();
    this.showStatus();
  }

  // The row of an event that makes place for a new one is used again: to make one takes longer than to fill it.
  spare(coming) {
    const last = this.list.lastChild;
    if (this.list.children.length + coming <= SHOWN || last.className) return blank();
    last.remove();
    if (last.lastChild !== last.firstChild) toggle(last);
    return last;
  }

  showStatus() {
    if (!this.source || this.source.readyState !== EventSource.OPEN) return;
    const shown = this.list.children.length;
    if (this.paused) say(this.status, `Paused. New events are kept for when you resume, the last ${SHOWN} of them.`);
    else if (this.where && !shown) say(this.status, `Following ${this.stream}. None of the last ${count(FILTERED)} events has ${this.where}. Waiting for one …`);
    else say(this.status, shown ? `Following ${this.stream}. ${plural(shown, "event")} shown, the newest first.${this.skipped ? ` ${count(this.skipped)} came and went unseen.` : ""}` : `Following ${this.stream}. Waiting for its first event …`);
  }
}

function lost(message) {
  const data = parseJson(message.data);
  const text =
    message.type === "stream.lost"
      ? `${plural(data.lost, "event")} before ${BigInt(data.resumed_after_text) + 1n} were removed by retention.`
      : `The stream went back to ${data.resumed_after_text}: an older state of it was restored.`;
  return make("li", { class: "lost" }, text);
}

// One line a row: the time, the offset and the fields. All of the event below it when somebody asks; at hundreds a second few are asked for.
const blank = () => make("li", {}, make("button", { type: "button", "aria-expanded": "false" }, make("time"), make("span", { class: "offset" }), make("span", { class: "fields" })));

// Hundreds of events are of one second.
let second = "";
let secondText = "";
function clockTime(at) {
  if (at.slice(0, 19) !== second) [second, secondText] = [at.slice(0, 19), clock.format(new Date(at))];
  return secondText;
}

// A text that a row has already stays: a new one costs style and layout. One that differs takes its place in the same node.
function put(element, text) {
  const { firstChild } = element;
  if (!firstChild) element.append(text);
  else if (firstChild.data !== text) firstChild.data = text;
}

function filled(row, message) {
  const { event } = (row.message = parseJson(message.data));
  const [time, offset, fields] = row.firstChild.children;
  const at = event._weft_published_at;
  put(time, clockTime(at));
  time.dateTime = at;
  put(offset, message.lastEventId);
  let next = fields.firstChild;
  for (const [name, value] of Object.entries(event)) {
    // A stream has a column for every field that ever came: those that this event lacks would hide the ones it has.
    if (value === null || name.startsWith("_weft_")) continue;
    next ??= fields.appendChild(make("span", { class: "name" }));
    put(next, name);
    next = next.nextSibling ?? fields.appendChild(new Text());
    next.data = typeof value === "string" ? value : JSON.stringify(value);
    next = next.nextSibling;
  }
  while (next) {
    const rest = next.nextSibling;
    next.remove();
    next = rest;
  }
  return row;
}

function toggle(row) {
  const [button, all] = row.children;
  button.setAttribute("aria-expanded", !all);
  if (all) all.remove();
  else row.append(make("pre", {}, JSON.stringify(row.message.event, null, 2)));
}
