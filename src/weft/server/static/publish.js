// A test event for a stream: a form of its fields.

import { ByKey } from "./actions.js";
import { askJson } from "./api.js";
import { me, refreshAll } from "./status.js";
import { Command, Failure, Panel, html, quoted } from "./ui.js";

const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;

// What was typed, as JSON. What does not fit its type is sent as a text: the service says what is wrong with it. Whole numbers keep all their digits.
function encoded(kind, text) {
  const base = kind.replace(/[(?].*/, "");
  if (base === "bool") return text;
  if (/^(u?int|float)/.test(base) && NUMBER.test(text.trim())) return text.trim();
  if (base === "json") {
    try {
      JSON.parse(text);
      return text;
    } catch {
      // A text, then.
    }
  }
  return JSON.stringify(text);
}

const HINTS = { timestamp: "2026-01-31T12:00:00Z", date: "2026-01-31", json: '{"a": [1, 2]}', bytes: "base64", uuid: "00000000-0000-0000-0000-000000000000" };

export class Publish extends ByKey {
  state = { values: {}, other: "", problem: null, done: null, busy: false };

  // The fields of a stream as they are typed; its text is the body of the request, and of the command.
  event({ values, other }) {
    const parts = Object.entries(this.props.stream.fields)
      .filter(([name]) => values[name])
      .map(([name, kind]) => `${JSON.stringify(name)}: ${encoded(kind, values[name])}`);
    if (other.trim()) {
      const more = JSON.parse(other);
      if (more === null || typeof more !== "object" || Array.isArray(more)) throw new SyntaxError("it is no object");
      // As they were typed: a number keeps its digits, and of a key that is there twice the service says so.
      if (Object.keys(more).length) parts.push(other.trim().slice(1, -1).trim());
    }
    return `{${parts.join(", ")}}`;
  }

  async send(event) {
    event.preventDefault();
    const { name, quarantine_stream: quarantine } = this.props.stream;
    this.setState({ busy: true, problem: null, done: null });
    try {
      let body;
      try {
        body = this.event(this.state);
      } catch (error) {
        throw new Error(`The other fields must be a JSON object: ${error.message}.`);
      }
      const path = `api/v1/streams/${encodeURIComponent(name)}`;
      const answer = await askJson(path, { method: "POST", headers: { "content-type": "application/json" }, body });
      const done = answer.rows_quarantined ? `It did not fit, and went to ${quarantine}.` : answer.rows_deduplicated ? "The stream has it already." : `Published, with the offset ${answer.last_rowid_text}.`;
      this.setState({ busy: false, done });
    } catch (problem) {
      this.setState({ busy: false, problem });
    }
    refreshAll();
  }

  render({ stream }, { values, other, problem, done, busy }) {
    const { key } = me();
    const may = !key || key.scopes.some((scope) => scope !== "read");
    let text = null;
    try {
      text = this.event({ values, other });
    } catch {
      // Said when it is sent.
    }
    const type = (name) => (event) => this.setState({ values: { ...values, [name]: event.target.value } });
    return html`
      <${Panel} id="publish" title="Publish a test event" note="Consumers and pipelines get it as any other.">
        <form class="form" onSubmit=${(event) => this.send(event)}>
          <div class="inputs">
            ${Object.entries(stream.fields).map(([name, kind]) => html`
              <label key=${name} class="field stacked">
                <span><code>${name}</code> <span class="note">${kind}</span></span>
                ${kind.startsWith("bool")
                  ? html`<select value=${values[name] || ""} onChange=${type(name)}><option value="">–</option><option>true</option><option>false</option></select>`
                  : html`<input autocomplete="off" spellcheck=${false} value=${values[name] || ""} placeholder=${HINTS[kind.replace(/[(?].*/, "")] || ""} onInput=${type(name)} />`}
              </label>
            `)}
          </div>
          <label class="field stacked">Other fields, as a JSON object <textarea rows="2" spellcheck=${false} value=${other} onInput=${(event) => this.setState({ other: event.target.value })}></textarea></label>
          ${problem && html`<${Failure} error=${problem} />`}
          ${done && html`<p role="status" class="good-text">${done}</p>`}
          ${!may && html`<p class="note">Publishing is off: the key ${key.id} has the scope read, and this needs write.</p>`}
          <div class="actions start"><button class="primary" disabled=${busy || !may}>Publish</button>${text !== null && html`<${Command} text=${`weft streams publish ${quoted(stream.name)} --data ${quoted(text)}`} />`}</div>
        </form>
      <//>
    `;
  }
}
