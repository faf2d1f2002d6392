// Streaming pipelines: how far each has come, what waits, and what was rejected.

import { count } from "./dom.js";
import { Chip, Code, Command, Empty, Facts, Panel, Table, Time, Title, View, html, to } from "./ui.js";

const places = (list) => list.map((each) => each.name).join(", ");
const Running = ({ pid }) => (pid ? html`<${Chip} kind="good">● running<//>` : html`<${Chip}>not running here<//>`);

export class StreamingPipelines extends View {
  path = () => "api/v1/streaming";

  show({ pipelines, at }) {
    const now = new Date(at);
    return html`
      <${Title} name="Streaming pipelines" />
      <section class="panel">
        ${pipelines.length
          ? html`
              <${Table} label="Streaming pipelines" head=${[["Pipeline"], ["State"], ["From", "medium"], ["To", "medium"], ["Batches", "number"], ["Last batch", "number"]]}>
                ${pipelines.map(
                  (each) => html`
                    <tr key=${each.name}>
                      <th scope="row"><a class="strong" href=${to("streaming", each.name)}>${each.name}</a>${each.step && html` <${Chip}>${each.step}<//>`}<span class="note block">${each.description}</span></th>
                      <td><${Running} pid=${each.running} />${each.problem && html`<span class="note block">${each.problem}</span>`}</td>
                      <td class="medium">${places(each.sources)}</td>
                      <td class="medium">${places(each.targets)}</td>
                      <td class="number">${each.committed == null ? "–" : count(each.committed + 1)}</td>
                      <td class="number"><${Time} relative at=${each.last_batch} now=${now} /></td>
                    </tr>
                  `,
                )}
              <//>
            `
          : html`<${Empty} title="No streaming pipeline is declared."><p>They carry rows from streams, topics and files to tables, in small batches.</p><//>`}
      </section>
    `;
  }
}

export class StreamingPipeline extends View {
  path = () => `api/v1/streaming/${encodeURIComponent(this.props.name)}`;

  show(pipeline) {
    const { name, watermark, state, dead_letters: letters } = pipeline;
    const now = new Date(pipeline.at);
    return html`
      <${Title} kind="Streaming pipeline" name=${name} about=${pipeline.description}><${Running} pid=${pipeline.running} /><//>
      ${pipeline.problem && html`<p class="banner">${pipeline.problem}</p>`}
      <${Panel} id="stands" title="How it stands">
        <${Facts} facts=${[
          ["Last batch", pipeline.last_batch ? html`<${Time} relative at=${pipeline.last_batch} now=${now} />` : "none yet"],
          ["Batches done", pipeline.committed == null ? null : count(pipeline.committed + 1)],
          ["In hand", pipeline.planned != null && pipeline.planned !== pipeline.committed && `batch ${count(pipeline.planned)}`],
          ["Process", pipeline.running],
          ["Begins a batch", pipeline.every_seconds == null ? "when the last is done" : `every ${pipeline.every_seconds} s`],
          ["Delivery", pipeline.delivery.replaceAll("_", " ")],
          ["Writes", html`${pipeline.targets.map((each, index) => `${index ? ", " : ""}${each.name} (${each.mode})`)}`],
          ["Declared", pipeline.declared],
        ]} />
        ${!pipeline.running && html`<p class="foot"><${Command} text=${`weft consume ${name}`} /></p>`}
      <//>
      <${Panel} id="sources" title="Lag by source">
        <${Table} label="Lag by source" head=${[["Source"], ["Lag", "number"], ["Read up to", "medium"], ...(watermark ? [["Rows up to", "medium"]] : [])]}>
          ${pipeline.lag.map((each) => html`
            <tr key=${each.source}>
              <th scope="row" class="strong">${each.source}</th>
              <td class=${`number ${each.lag > 0 ? "loud" : ""}`}>${each.words ?? "–"}</td>
              <td class="medium"><code>${each.position ?? "–"}</code></td>
              ${watermark && html`<td class="medium"><${Time} at=${watermark.sources[each.source]} /></td>`}
            </tr>
          `)}
        <//>
      <//>
      ${(watermark || pipeline.state_problem) && html`
        <${Panel} id="state" title="State">
          ${pipeline.state_problem && html`<p class="foot note">${pipeline.state_problem}</p>`}
          ${watermark && html`<${Facts} facts=${[
            ["Watermark", watermark.watermark ? html`<${Time} at=${watermark.watermark} />` : "none yet"],
            ["Held by", watermark.held_by.join(", ")],
            [pipeline.step === "join" ? "Oldest rows kept until" : "Next window ends", watermark.next_window_ends && html`<${Time} at=${watermark.next_window_ends} />`],
            ["Closes with a row at", watermark.next_window_ends && html`<${Time} at=${new Date(new Date(watermark.next_window_ends).getTime() + watermark.lateness_ms)} />`],
            ["Windows open", state?.windows == null ? null : count(state.windows)],
            ["Rows in the state", count(state?.rows)],
          ]} />`}
        <//>
      `}
      ${letters && html`<${Letters} letters=${letters} name=${name} />`}
      ${pipeline.sql && html`<${Panel} id="sql" title="SQL" note=${pipeline.declared}><${Code} label="SQL" text=${pipeline.sql} /><//>`}
    `;
  }
}

const Letters = ({ letters, name }) => html`
  <${Panel} id="letters" title="Dead letters" note=${letters.count == null ? "" : `${count(letters.count)}${letters.more ? " and more" : ""}`}>
    ${letters.problem && html`<p class="foot note">${letters.problem}</p>`}
    ${letters.count === 0 && html`<p class="foot note">There are none.</p>`}
    ${letters.groups.length > 0 && html`
      <${Table} label="Dead letters by error" head=${[["Error"], ["Rows", "number"], ["Stage", "medium"], ["Newest", "number medium"]]}>
        ${letters.groups.map((each) => html`
          <tr key=${`${each.stage} ${each.error}`}>
            <th scope="row">${each.error}<details class="why"><summary>One of them</summary><pre>${each.payload}</pre><${Command} text=${`weft dlq show ${name} ${each.letter_id.slice(0, 12)}`} /></details></th>
            <td class="number">${count(each.count)}</td>
            <td class="medium">${each.stage}</td>
            <td class="number medium"><${Time} relative at=${each.newest} /></td>
          </tr>
        `)}
      <//>
      <p class="foot top-gap"><a href=${to("letters", name)}>All of them, to replay or purge</a> <${Command} text=${`weft dlq replay ${name} --all`} /></p>
    `}
  <//>
`;
