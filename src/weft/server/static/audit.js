// The audit log: who did what, when, and what came of it.

import { Chip, Empty, Table, Time, Title, View, html, to } from "./ui.js";

const FILTERS = [["key", "Key"], ["action", "Action"], ["object", "Object"]];
const kind = (outcome) => (outcome === null ? "busy" : outcome.startsWith("failed") ? "bad" : "");

export class Audit extends View {
  state = { object: this.props.object || "" };

  path = () => {
    const query = new URLSearchParams();
    for (const [name] of FILTERS) if (this.state[name]?.trim()) query.set(name, this.state[name].trim());
    if (this.state.before) query.set("before", this.state.before);
    return `api/v1/audit?${query}`;
  };

  show({ actions }) {
    const filter = (name) => (event) => {
      this.setState({ [name]: event.target.value, before: null }, () => this.poll.now());
    };
    return html`
      <${Title} name="Audit log" about="Every action over HTTP, the newest first: who, when, and what came of it." />
      <section class="panel">
        <form class="head controls lines" onSubmit=${(event) => event.preventDefault()}>
          ${FILTERS.map(([name, label]) => html`<label key=${name} class="field">${label} <input list=${`audit-${name}`} value=${this.state[name] || ""} size="14" autocomplete="off" spellcheck=${false} onChange=${filter(name)} /><datalist id=${`audit-${name}`}>${[...new Set(actions.map((each) => (name === "key" ? each.key_name || each.key_id : name === "object" ? each.object.split(" --")[0] : each[name])))].map((value) => html`<option key=${value} value=${value} />`)}</datalist></label>`)}
          ${this.state.before && html`<button type="button" onClick=${() => this.setState({ before: null }, () => this.poll.now())}>The newest</button>`}
        </form>
        ${actions.length
          ? html`
              <${Table} stacked label="Actions" head=${[["When"], ["Who"], ["Did"], ["What came of it", "medium"]]}>
                ${actions.map((each) => html`
                  <tr key=${each.id}>
                    <th scope="row"><${Time} at=${each.at} /></th>
                    <td>${each.key_name || html`<code>${each.key_id}</code>`}<span class="note block medium line-up">${each.client}</span></td>
                    <td><span class="strong">${each.action}</span> <${Of} action=${each.action} object=${each.object} /><span class="note block narrow">${each.outcome}</span></td>
                    <td class="medium">${each.outcome === null ? html`<${Chip} kind="busy">not known yet<//>` : html`<span class=${kind(each.outcome) === "bad" ? "bad-text" : ""}>${each.outcome}</span>`}</td>
                  </tr>
                `)}
              <//>
              ${actions.length === 50 && html`<p class="foot top-gap"><button type="button" onClick=${() => this.setState({ before: actions.at(-1).at }, () => this.poll.now())}>Earlier</button></p>`}
            `
          : html`<${Empty} title="There is no such action."><p>What people run, pause, cancel, replay and purge over HTTP appears here.</p><//>`}
      </section>
    `;
  }
}

export function Of({ action, object, kind = "" }) {
  const [name, rest] = object.split(/ (?=--)(.*)/);
  const view = { cancel: "runs", "streams replay": "streams", "streams purge": "streams", "dlq replay": "letters", "dlq purge": "letters" }[action] || "pipelines";
  return html`<a class=${kind} href=${to(view, name)}>${name}</a> <span class="note">${rest}</span>`;
}
