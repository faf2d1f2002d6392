// Buttons that do something. Each asks first, says what will happen, and shows what the service answered.

import { askJson, key } from "./api.js";
import { refreshAll } from "./status.js";
import { Command, Component, html } from "./ui.js";

// `command` is what does the same at a terminal: without a key it is shown in place of the button.
export class Action extends Component {
  state = { asks: false, busy: false, answer: null, failed: false };

  async act() {
    this.setState({ busy: true });
    try {
      const { done } = await askJson(this.props.path, { method: "POST" });
      this.setState({ asks: false, busy: false, failed: false, answer: done });
    } catch (error) {
      this.setState({ asks: false, busy: false, failed: true, answer: error.message });
    }
    refreshAll();
  }

  componentDidUpdate(_, before) {
    if (this.state.asks && !before.asks) {
      this.dialog.showModal();
      this.dialog.querySelector("button").focus();
    }
  }

  render({ label, what, command, primary }, { asks, busy, answer, failed }) {
    if (!key()) return html`<${Command} text=${command} />`;
    return html`
      <span class="action">
        ${answer && html`<span class=${`note ${failed ? "bad-text" : ""}`} role="status">${answer}</span>`}
        <button type="button" class=${primary ? "primary" : ""} disabled=${busy} onClick=${() => this.setState({ asks: true, answer: null })}>${label}</button>
        ${asks &&
        html`
          <dialog ref=${(element) => (this.dialog = element)} aria-label=${label} onClose=${() => this.setState({ asks: false })}>
            <form method="dialog">
              <h2>${label}?</h2>
              <p>${what}</p>
              <p class="note">At a terminal: <code>${command}</code></p>
              <div class="actions">
                <button value="cancel">Leave it</button>
                <button type="button" class="primary" disabled=${busy} onClick=${() => this.act()}>${label}</button>
              </div>
            </form>
          </dialog>
        `}
      </span>
    `;
  }
}
