// Buttons that do something. Each asks first, says what will happen, and reports what the service answered.

import { askJson, post } from "./api.js";
import { learn, me, noticed, onMe, refreshAll, unlearn } from "./status.js";
import { Command, Component, Failure, html } from "./ui.js";

const FOLLOWED_MS = 1500;

// Draws again when it becomes known what the key may do.
export class ByKey extends Component {
  componentDidMount() {
    this.stop = onMe(() => this.setState({}));
  }

  componentWillUnmount() {
    this.stop();
  }
}

// `path` and `body` are the request. With `plan` the dialog first asks what would be done, by `dry_run`, and `what` is a function of the answer; `decided`
// makes the body of that. `command` does the same at a terminal. `inputs` are times that are asked for: `body` (null: not enough) and `command` are then
// functions of them.
export class Action extends ByKey {
  state = { asks: false, busy: false, plan: null, problem: null, values: {} };

  open() {
    this.setState({ asks: true, plan: null, problem: null, values: {} }, () => this.count());
  }

  body() {
    const { body } = this.props;
    return typeof body === "function" ? body(this.state.values) : body;
  }

  async count() {
    const body = this.body();
    if (!this.props.plan || body === null) return;
    try {
      const plan = await post(this.props.path, { ...body, dry_run: true });
      this.setState({ plan, problem: null });
    } catch (problem) {
      this.failed(problem);
    }
  }

  failed(problem) {
    const away = { message: "The service does not answer. Whether it was done is not known: look again when it does." };
    this.setState({ busy: false, problem: problem.status ? problem : away });
    if (problem.status === 401) unlearn(problem);
    if (problem.status === 403) learn();
  }

  async act() {
    const { path, decided, label } = this.props;
    this.setState({ busy: true, problem: null });
    try {
      const answer = await post(path, decided ? decided(this.state.plan) : this.body());
      this.setState({ busy: false });
      this.dialog?.close(); // which gives the focus back; Escape may have closed it meanwhile
      follow(`${label} ${answer.pipeline ?? ""}`.trim(), answer, this.command());
    } catch (problem) {
      this.failed(problem);
    }
    refreshAll();
  }

  command() {
    const { command } = this.props;
    return typeof command === "function" ? command(this.state.values) : command;
  }

  componentDidUpdate(_, before) {
    if (this.state.asks && !before.asks) {
      this.dialog.showModal();
      this.dialog.querySelector("input, button").focus();
    }
  }

  render({ label, what, primary, plan: plans, small, of, inputs = [] }, { asks, busy, plan, problem, values }) {
    const { may_act: may, why_not: why } = me();
    const text = typeof what === "function" ? plan && what(plan) : what;
    const type = (name) => (event) => this.setState({ values: { ...values, [name]: event.target.value }, plan: null, problem: null }, () => this.count());
    const waits = this.body() === null ? null : html`<p role="status">Counting …</p>`;
    return html`
      <span class="action">
        <button type="button" class=${`${primary ? "primary" : ""} ${small ? "small" : ""}`} disabled=${!may} title=${may ? "" : why} aria-label=${of ? `${label} ${of}` : null} onClick=${() => this.open()}>${label}</button>
        ${asks &&
        html`
          <dialog ref=${(element) => (this.dialog = element)} aria-label=${label} onClose=${() => this.setState({ asks: false })}>
            <form method="dialog">
              <h2>${label}?</h2>
              ${inputs.map(([name, title]) => html`<label key=${name} class="field stacked">${title} <input type="datetime-local" step="1" value=${values[name] || ""} onChange=${type(name)} /></label>`)}
              ${problem ? html`<${Failure} error=${problem} />` : html`<div class="what">${text || waits}</div>`}
              <p class="note">At a terminal: <${Command} text=${this.command()} /></p>
              <div class="actions">
                <button value="cancel">Leave it</button>
                <button type="button" class="primary" disabled=${busy || Boolean(problem) || (plans && (!plan || plan.letters === 0))} onClick=${() => this.act()}>${label}</button>
              </div>
            </form>
          </dialog>
        `}
      </span>
    `;
  }
}

// Says how an action went; of a command that was started, again when it has ended, by the audit log.
async function follow(name, answer, command) {
  const notice = noticed({ name, text: answer.done, kind: "busy" });
  if (answer.done !== "started") return notice({ kind: "good" });
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, FOLLOWED_MS));
    try {
      const { outcome } = await askJson(`api/v1/audit/${answer.action}`);
      if (outcome === null) continue;
      notice(outcome.startsWith("failed") ? { text: outcome, kind: "bad", command } : { text: outcome, kind: "good" });
    } catch (error) {
      // A service that is restarted answers again.
      if (!(error.status >= 400 && error.status < 500)) continue;
      notice({ text: "It was started; the log of the service says how it ends.", kind: "" });
    }
    return refreshAll();
  }
}

// Why the buttons are off, where they are, and what does the same at a terminal.
export class ActionsOff extends ByKey {
  render({ commands }) {
    const { may_act: may, why_not: why, key } = me();
    if (may || !why) return null;
    return html`
      <div class="off note">
        <p>${key ? `Actions are off: ${why}` : html`Actions are off without a key of the scope admin. Give one with the button Key, or use a terminal:`}</p>
        ${commands.map((text) => html`<${Command} key=${text} text=${text} />`)}
      </div>
    `;
  }
}
