// Components that several views use. Texts of others become text nodes: nothing here parses HTML.

import { Component, h, render } from "./preact.js";
import htm from "./htm.js";
import { ago, count, duration, say, utc } from "./dom.js";
import { poll } from "./status.js";

export const html = htm.bind(h);
export { Component, render };

export const to = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

export const MARKS = { succeeded: "✓", failed: "✕", interrupted: "!", running: "…", cancelled: "⊘", skipped: "–" };
export const KINDS = { succeeded: "good", failed: "bad", interrupted: "warn", running: "busy", cancelled: "warn", skipped: "" };

export const Chip = ({ kind = "", children }) => html`<span class=${`chip ${kind}`}>${children}</span>`;

export const Status = ({ status }) => html`<${Chip} kind=${KINDS[status]}>${status ? `${MARKS[status]}\u00a0${status}` : "never ran"}<//>`;

// A moment in the reader's zone, with UTC on hover.
export function Time({ at, now, relative = false }) {
  if (!at) return "–";
  const moment = new Date(at);
  const text = relative ? ago(moment, now ?? Date.now()) : moment.toLocaleString().replace(/ (?=[AP]M$)/, "\u00a0");
  const title = `${relative ? `${moment.toLocaleString()}, ` : ""}${utc(moment)}`;
  return html`<time class=${relative ? "line-up" : ""} datetime=${moment.toISOString()} title=${title}>${text}</time>`;
}

// How long it is until a moment.
export function until(at, now = Date.now()) {
  const seconds = (new Date(at) - now) / 1000;
  return seconds <= 0 ? "now" : `in ${duration(Math.max(1, Math.round(seconds)))}`;
}

// A name that leads to its view. Where it is too long for its line it is broken after a part of it.
export const NameLink = ({ href, name }) => html`<a class="strong" href=${href}>${name.split(/(?<=[_.-])/).map((part, index) => [index > 0 && html`<wbr />`, part])}</a>`;

export const Panel = ({ title, note, children, id }) => html`
  <section class="panel" aria-labelledby=${id}>
    <div class="head"><h2 id=${id}>${title}</h2>${note && html`<p class="note">${note}</p>`}</div>
    ${children}
  </section>
`;

// A figure that matters most, with a line below it.
export const Tile = ({ title, note, loud = false, children }) => html`
  <div class="tile"><h2>${title}</h2><p class=${`figure ${loud ? "loud" : ""}`}>${children}</p><p class="note">${note || "\u00a0"}</p></div>
`;

// Pairs of a name and a value; those without a value are left out.
export const Facts = ({ facts }) => html`
  <dl class="facts">
    ${facts.filter(([, value]) => value != null && value !== "" && value !== false).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>
`;

// `stacked`: on a narrow screen the heading of a row, a long text, has a line of its own.
export const Table = ({ label, head, children, id, stacked = false }) => html`
  <div class="scroll" role="group" aria-label=${label} tabindex="0">
    <table class=${stacked ? "stacked" : ""}>
      <thead><tr>${head.map(([text, kind]) => html`<th scope="col" class=${kind} key=${text}>${text}</th>`)}</tr></thead>
      <tbody id=${id}>${children}</tbody>
    </table>
  </div>
`;

export const Empty = ({ title, children }) => html`<div class="empty"><p class="strong">${title}</p>${children}</div>`;

export const Code = ({ text, label }) => html`<pre class="code" tabindex="0" role="group" aria-label=${label}>${text}</pre>`;

// Over plain HTTP from another machine a browser lets no page copy: then it is selected.
async function copy({ currentTarget: button }) {
  try {
    await navigator.clipboard.writeText(button.previousSibling.textContent);
    say(button, "Copied");
    setTimeout(say, 2000, button, "Copy");
  } catch {
    getSelection().selectAllChildren(button.previousSibling);
  }
}

export const Command = ({ text }) => html`
  <span class="command"><code>${text}</code><button type="button" class="quiet small" aria-label=${`Copy ${text}`} onClick=${copy}>Copy</button></span>
`;

// For a shell.
export const quoted = (text) => (/^[\w@%+=:,./][\w@%+=:,./-]*$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);

// The commands that a text of Weft names, to be copied: `To begin again: weft checkpoints reset orders.` None that a shell would read otherwise: an
// error may quote what somebody sent.
const COMMAND = /(?:^|[:.?;] )(weft(?: [\w@%+=:./-]*[\w/-])+?)(?=\.(?:\s|$)|;|$)/gm;
export const Commands = ({ text }) => [...(text || "").matchAll(COMMAND)].map(([, each]) => html`<${Command} key=${each} text=${each} />`);

// What the service or the command line says of an error.
export const Failure = ({ error }) => html`<div class="failure" role="alert"><p>${error.message}</p>${error.hint && html`<p>${error.hint}</p><${Commands} text=${error.hint} />`}</div>`;

export const Notices = ({ notices }) =>
  notices.map(
    ({ id, name, text, kind, command, close }) => html`
      <div key=${id} class=${`notice ${kind}`}>
        <p><strong>${name}</strong> ${text}</p>
        ${command && html`<${Command} text=${command} />`}
        <button type="button" class="quiet small" aria-label=${`Put away: ${name}`} onClick=${close}>Close</button>
      </div>
    `,
  );

// The title of a view, its kind above it, and what is said of it below.
export const Title = ({ kind, name, about, children }) => html`
  <div class="title">
    <div>${kind && html`<p class="note">${kind}</p>`}<h1>${name}</h1></div>
    <div class="controls">${children}</div>
    ${about && html`<p class="about">${about}</p>`}
  </div>
`;

// Runs as bars, the newest on the right, which is seen where not all have room: as high as the duration, each a link to its run.
export function Timeline({ runs, small = false }) {
  const longest = Math.max(...runs.map((run) => run.seconds || 0), 0.001);
  const height = (run) => `${Math.round(Math.max(0.16, Math.sqrt((run.seconds || 0) / longest)) * 100)}%`;
  return html`
    <ol class=${`timeline ${small ? "small" : ""}`}>
      ${[...runs].reverse().map((run) => {
        const said = `${run.status}, ${duration(run.seconds)}, ${new Date(run.started_at).toLocaleString()}, ${utc(run.started_at)}`;
        return html`
          <li key=${`${run.run_id} ${run.attempt ?? run.started_at}`}>
            <a href=${to("runs", run.run_id)} title=${said} aria-label=${said}><span class=${`bar ${KINDS[run.status]}`} style=${{ height: height(run) }}></span></a>
          </li>
        `;
      })}
    </ol>
  `;
}

export const changes = (run) => (run.inserted || 0) + (run.updated || 0) + (run.deleted || 0);
export const changed = (run) => (run ? count(changes(run)) : "–");

export const Loading = ({ text = "Loading …" }) => html`<h1 class="hidden">Weft</h1><p class="note" role="status">${text}</p>`;

// A view that shows what a path answers. Subclasses have `path`, `every` and `show(data)`.
export class View extends Component {
  every = 4000;
  others = [];

  componentDidMount() {
    const missing = (error) => this.setState({ missing: error });
    this.poll = poll(() => this.path(), (data) => this.setState({ data, missing: null }), { every: this.every, missing });
  }

  // Asks for something else too, without which the view is shown all the same.
  also(path, show, every) {
    this.others.push(poll(path, show, { every, missing: () => {} }));
  }

  componentWillUnmount() {
    [this.poll, ...this.others].forEach((each) => each.stop());
  }

  render(_, { data, missing }) {
    if (missing) {
      const { status, message, hint } = missing;
      const commands = html`<${Commands} text=${hint} />`;
      if (status === 404) return html`<${Title} kind="Not found" name=${message} about=${hint}>${commands}<//>`;
      return html`<${Title} name=${status === 403 ? "Not for this key" : "It cannot be shown"} about=${`${message} ${hint || ""}`}>${commands}<//>`;
    }
    return data ? this.show(data) : html`<${Loading} />`;
  }
}
