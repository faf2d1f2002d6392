// The scheduler: who leads, what runs, what waits, what is due next, and what is paused.

import { ActionsOff } from "./actions.js";
import { count } from "./dom.js";
import { Pause, Resume, names } from "./pipelines.js";
import { me, onMe } from "./status.js";
import { Chip, Command, Empty, Facts, NameLink, Panel, Table, Time, Title, View, html, to, until } from "./ui.js";

const Name = ({ name }) => html`<${NameLink} href=${to("pipelines", name)} name=${name} />`;
const MOST = 100;
// An action over HTTP is recorded just before it is done; one at a terminal is not.
const RECORDED_MS = 30_000;

export class Schedule extends View {
  every = 3000;
  path = () => "api/v1/scheduler";

  componentDidMount() {
    super.componentDidMount();
    this.others.push({ stop: onMe(() => this.setState({})) });
  }

  // Who paused what, for those who may see it.
  componentDidUpdate() {
    if (this.others.length > 1 || !me().may_act || !this.state.data?.paused.length) return;
    this.also("api/v1/audit?limit=200", ({ actions }) => this.setState({ actions }), 10000);
  }

  by({ pipeline, paused_at: at }) {
    const last = this.state.actions?.find((each) => each.object === pipeline && ["pause", "resume"].includes(each.action));
    const did = last?.action === "pause" && Math.abs(new Date(at) - new Date(last.at)) < RECORDED_MS;
    return did ? html`<a href=${to("audit", pipeline)}>${last.key_name || last.key_id}</a>` : "–";
  }

  show({ leader, running, queue, next, paused, at }) {
    const now = new Date(at);
    const nobody = !leader.leads;
    const held = new Set(paused.map((each) => each.pipeline));
    return html`
      <${Title} name="Schedule" about="What the scheduler does, and when each pipeline is due.">
        ${nobody ? html`<${Chip} kind=${next.length ? "warn" : ""}>no scheduler leads<//>` : html`<${Chip} kind="good">● a scheduler leads<//>`}
      <//>
      <${ActionsOff} commands=${["weft pause NAME", "weft resume NAME"]} />
      <${Panel} id="leader" title="Leader">
        ${leader.since
          ? html`<${Facts} facts=${[
              ["Leads", leader.leads ? "yes" : "no: it has ended"],
              ["Host", leader.host],
              ["Process", leader.pid],
              ["Since", html`<${Time} relative at=${leader.since} now=${now} />`],
            ]} />`
          : html`<p class="foot note">No scheduler has run with this run log. Schedules may be followed by cron or <code>weft run-due</code>.</p>`}
        ${nobody && html`<p class="foot"><${Command} text="weft scheduler" /></p>`}
      <//>
      ${running.length > 0 && html`
        <${Panel} id="running" title="Running now" note=${count(running.length)}>
          <${Table} label="Running now" head=${[["Pipeline"], ["Run"], ["Attempt", "number medium"], ["Host", "medium"], ["Since", "number"]]}>
            ${running.map((each) => html`
              <tr key=${each.run_id}>
                <th scope="row"><${Name} name=${each.pipeline} /></th>
                <td><a href=${to("runs", each.run_id)} title=${each.run_id}><code>${each.run_id.slice(0, 8)}</code></a></td>
                <td class="number medium">${count(each.attempt)}</td>
                <td class="medium">${each.host}</td>
                <td class="number"><${Time} relative at=${each.started_at} now=${now} /></td>
              </tr>
            `)}
          <//>
        <//>
      `}
      <${Panel} id="queue" title="Queue" note=${!queue.length ? "Nothing is due now." : nobody ? `${count(queue.length)}, and no scheduler that starts them` : count(queue.length)}>
        ${queue.length > 0 && html`
          <${Table} label="Queue" head=${[["Pipeline"], ["State"], ["Waits for", "medium"], ["Pool", "medium"], ["Due since", "number"]]}>
            ${queue.slice(0, MOST).map((each) => html`
              <tr key=${each.pipeline}>
                <th scope="row"><${Name} name=${each.pipeline} /></th>
                <td><${Chip} kind=${each.is_due && !nobody ? "busy" : "warn"}>${each.waits_for.length ? "waiting on upstream" : each.why}<//></td>
                <td class="medium">${names(each.waits_for, "pipelines")}</td>
                <td class="medium">${each.pool}</td>
                <td class="number"><${Time} relative at=${each.slot} now=${now} /></td>
              </tr>
            `)}
          <//>
        `}
      <//>
      <${Panel} id="next" title="Due next" note=${next.length > MOST && `the first ${count(MOST)} of ${count(next.length)}`}>
        ${next.length
          ? html`
              <${Table} label="Due next" head=${[["Pipeline"], ["Schedule", "medium"], ["State", "medium"], ["Due", "number"], ["At", "number wide"], ["Actions", "end medium"]]}>
                ${next.slice(0, MOST).map((each) => html`
                  <tr key=${each.pipeline}>
                    <th scope="row"><${Name} name=${each.pipeline} /></th>
                    <td class="medium line-up"><code>${each.schedule}</code></td>
                    <td class="medium note">${each.state}</td>
                    <td class="number">${until(each.next_due, now)}</td>
                    <td class="number wide"><${Time} at=${each.next_due} /></td>
                    <td class="end medium">${!held.has(each.pipeline) && html`<${Pause} name=${each.pipeline} of=${each.pipeline} small />`}</td>
                  </tr>
                `)}
              <//>
            `
          : html`<${Empty} title="No pipeline has a schedule." />`}
      <//>
      ${paused.length > 0 && html`
        <${Panel} id="paused" title="Paused" note=${count(paused.length)}>
          <${Table} label="Paused" head=${[["Pipeline"], ["By"], ["Since", "number medium"], ["Actions", "end"]]}>
            ${paused.map((each) => html`<tr key=${each.pipeline}><th scope="row"><${Name} name=${each.pipeline} /></th><td>${this.by(each)}</td><td class="number medium"><${Time} relative at=${each.paused_at} now=${now} /></td><td class="end"><${Resume} name=${each.pipeline} of=${each.pipeline} small /></td></tr>`)}
          <//>
        <//>
      `}
    `;
  }
}
