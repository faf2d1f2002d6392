// Services, workers, schedulers and streaming pipelines: which run, and which ended without a word.

import { count, plural } from "./dom.js";
import { Chip, Empty, NameLink, Table, Time, Title, View, html, to } from "./ui.js";

const HINTS = { service: "weft serve", worker: "weft worker", scheduler: "weft scheduler" };

export class Processes extends View {
  path = () => "api/v1/processes";

  show({ processes, problem, at }) {
    const now = new Date(at);
    const silent = processes.filter((each) => !each.lives);
    const rows = [...silent, ...processes.filter((each) => each.lives)];
    return html`
      <${Title} name="Processes" about="Services, workers of models, schedulers and streaming pipelines: which run, and which ended without a word.">
        ${problem ? null : silent.length > 0 ? html`<${Chip} kind="bad">${count(silent.length)} silent<//>` : html`<${Chip} kind="good">●${"\u00a0"}${plural(processes.length, "process", "processes")}<//>`}
      <//>
      ${problem && html`<p class="banner">${problem}</p>`}
      <section class="panel">
        ${rows.length
          ? html`
              <${Table} label="Processes" head=${[["Process"], ["State"], ["Host", "medium"], ["Number", "number wide"], ["Since", "medium"], ["Last heard", "number"]]}>
                ${rows.map((each) => html`
                  <tr key=${`${each.kind} ${each.host} ${each.pid} ${each.pipeline}`}>
                    <th scope="row">${each.pipeline ? html`<${NameLink} href=${to("streaming", each.pipeline)} name=${each.pipeline} /> <${Chip}>streaming<//>` : html`<span class="strong">${each.kind}</span><code class="note block">${HINTS[each.kind]}</code>`}</th>
                    <td>${each.lives ? (each.failing ? html`<${Chip} kind="bad">✕${"\u00a0"}failing<//>` : html`<${Chip} kind="good">●${"\u00a0"}running<//>`) : html`<${Chip} kind="bad">silent<//>`}</td>
                    <td class="medium">${each.host}</td>
                    <td class="number wide">${each.pid}</td>
                    <td class="medium"><${Time} at=${each.since} /></td>
                    <td class="number"><${Time} relative at=${each.heard} now=${now} /></td>
                  </tr>
                `)}
              <//>
            `
          : html`<${Empty} title="No process is known."><p>Services, workers and schedulers say in the run log that they live.</p><//>`}
      </section>
    `;
  }
}
