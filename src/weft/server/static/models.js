// A model: whether it is fresh, what it reads, its columns and where each comes from.

import { count } from "./dom.js";
import { Chip, Code, Command, Facts, Panel, Table, Time, View, html, quoted, to } from "./ui.js";

const KINDS = { fresh: "good", stale: "warn", unknown: "" };
// Where an engine does its work.
export const WHERE = { pushdown: "inside the database", spark: "on Spark", python: "as a function that makes a frame" };
const PLACES = { stream: "streams", model: "pipelines", pipeline: "pipelines", streaming: "streaming" };

// A field of a stream, or a column of a table, with a link to what writes it.
const Origin = ({ kind, name, table, column }) => html`<code>${kind ? html`<a href=${to(PLACES[kind], name)}>${table}.${column}</a>` : `${table}.${column}`}</code>`;

// Where each column of a model comes from.
export const Columns = ({ model }) => html`
  ${model.problem && html`<p class="foot note">${model.problem}</p>`}
  ${model.columns.length > 0
    ? html`
        <${Table} label="Columns" head=${[["Column"], ["Type", "medium"], ["Comes from"]]}>
          ${model.columns.map(({ column, type, comes_from: origins }) => html`
            <tr key=${column}>
              <th scope="row"><code>${column}</code></th>
              <td class="medium"><code>${type ?? "–"}</code></td>
              <td>${origins == null ? "–" : origins.length ? origins.map((each, index) => html`${index ? ", " : ""}<${Origin} ...${each} />`) : html`<span class="note">no column</span>`}</td>
            </tr>
          `)}
        <//>
      `
    : html`<p class="foot"><${Command} text=${`weft models show ${quoted(model.model)}`} /></p>`}
`;

// Below how a pipeline stands.
export class ModelPanels extends View {
  every = 10000;
  path = () => `api/v1/models/${encodeURIComponent(this.props.name)}`;

  // It is a part of a view, which has the heading.
  render(props, state) {
    return state.data || state.missing ? super.render(props, state) : html`<p class="note" role="status">Loading …</p>`;
  }

  show(model) {
    const now = new Date(model.at);
    return html`
      <${Panel} id="model" title="The model">
        <${Facts} facts=${[
          ["State", html`<${Chip} kind=${KINDS[model.state]}>${model.state}<//>${model.why && html` <span class="note">${model.why}</span>`}`],
          ["Built", model.built_at ? html`<${Time} relative at=${model.built_at} now=${now} />` : "never"],
          ["Rows", count(model.rows)],
          ["Table", model.table],
          ["Runs", WHERE[model.engine]],
        ]} />
        ${model.inputs.length > 0 && html`
          <${Table} label="Inputs" head=${[["Input"], ["Kind", "medium"], ["New since the build"]]}>
            ${model.inputs.map(({ name, kind, new: news }) => html`
              <tr key=${name}>
                <th scope="row" class="strong">${kind in PLACES ? html`<a href=${to(PLACES[kind], name.split(".").at(-1))}>${name}</a>` : name}</th>
                <td class="medium">${kind}</td>
                <td class=${news ? "" : "note"}>${news ?? "nothing that is known"}</td>
              </tr>
            `)}
          <//>
        `}
        ${model.left_out.map((line) => html`<p key=${line} class="foot"><${Chip} kind="warn">left out<//> ${line}</p>`)}
      <//>
      <${Panel} id="columns" title="Columns and where they come from" note=${model.columns.length ? count(model.columns.length) : ""}>
        <${Columns} model=${model} />
      <//>
      ${model.sql && html`<${Panel} id="sql" title="SQL that runs" note=${WHERE[model.engine]}><${Code} label="SQL" text=${model.sql} /><//>`}
    `;
  }
}
