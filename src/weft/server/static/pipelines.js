// Pipelines, models and runs.

import { Action, ActionsOff } from "./actions.js";
import { askJson } from "./api.js";
import { Chart } from "./chart.js";
import { briefDuration, count, duration, plural } from "./dom.js";
import { PurgeRows, ReplayRows } from "./letters.js";
import { ModelPanels, WHERE } from "./models.js";
import { Chip, Code, Command, Commands, Empty, Facts, NameLink, Panel, Status, Table, Time, Timeline, Title, View, changed, changes, html, quoted, to, until } from "./ui.js";

const HEAD = [["Pipeline"], ["Last run"], ["Runs", "wide"], ["Took", "number medium"], ["Read", "number medium"], ["Changed", "number medium"], ["Next", "medium"]];

export const names = (list, kind) => list.map((name, index) => html`${index ? ", " : ""}${kind ? html`<a href=${to(kind, name)}>${name}</a>` : name}`);

// On the first page and on that of pipelines.
export const PipelineTable = ({ label, ...rows }) => html`<${Table} label=${label} head=${HEAD}><${PipelineRows} ...${rows} /><//>`;

function PipelineRows({ pipelines, now }) {
  return pipelines.map(({ last, ...pipeline }) => {
    const aside = last?.quarantined ? `, ${count(last.quarantined)} quarantined` : "";
    return html`
      <tr key=${pipeline.name}>
        <th scope="row">
          <${NameLink} href=${to("pipelines", pipeline.name)} name=${pipeline.name} />
          ${pipeline.kind === "model" && html`<${Chip}>model<//>`}
          ${pipeline.paused_at && html`<${Chip} kind="warn">paused<//>`}
          <span class="note block">${pipeline.description || pipeline.targets.join(", ")}</span>
        </th>
        <td>
          <${Status} status=${pipeline.status} /> <span class="note">${last && html`<${Time} relative at=${last.started_at} now=${now} />`}${aside}</span>
          ${last?.error && html`<details class="why"><summary>Why</summary><pre>${last.error}</pre></details>`}
        </td>
        <td class="wide"><${Timeline} small runs=${pipeline.runs} /></td>
        <td class="number medium">${duration(last?.seconds)}</td>
        <td class="number medium">${count(last?.rows_read)}</td>
        <td class="number medium">${changed(last)}</td>
        <td class="medium line-up" title=${pipeline.state || ""}>
          ${pipeline.next_due ? html`<${Time} at=${pipeline.next_due} /><span class="note block">${pipeline.schedule}</span>` : html`<span class="note">${pipeline.schedule || (pipeline.kind === "model" ? "with its inputs" : "by hand")}</span>`}
        </td>
      </tr>
    `;
  });
}

export class Pipelines extends View {
  path = () => "api/v1/pipelines";

  show({ pipelines, problem, at }) {
    return html`
      <${Title} name="Pipelines and models" about=${problem} />
      <section class="panel">
        ${pipelines.length
          ? html`<${PipelineTable} label="Pipelines and models" pipelines=${pipelines} now=${new Date(at)} />`
          : html`<${Empty} title="No pipeline is declared."><p>Pipelines load tables on a schedule; their last runs appear here.</p><//>`}
      </section>
    `;
  }
}

const FAILED = ["failed", "interrupted"];
const api = (name) => `api/v1/pipelines/${encodeURIComponent(name)}`;

export const Pause = ({ name, ...more }) => html`<${Action} label="Pause" path=${`${api(name)}/pause`} command=${`weft pause ${quoted(name)}`} what="Its schedule is not followed until somebody resumes it. What runs now goes on." ...${more} />`;
export const Resume = ({ name, ...more }) => html`<${Action} label="Resume" path=${`${api(name)}/resume`} command=${`weft resume ${quoted(name)}`} what="Its schedule is followed again. Slots that passed meanwhile are run only with catchup." ...${more} />`;
const RUNS = (name, targets) => `A process of the service's machine runs ${name}, whatever its schedule says.${targets} A run that failed is continued: what it had committed is not done twice.`;

export class Pipeline extends View {
  path = () => api(this.props.name);

  // What targets put aside, once a run that is shown did so.
  componentDidUpdate() {
    if (this.others.length || !this.state.data?.runs.some((run) => run.quarantined)) return;
    this.also(`${this.path()}/quarantine`, ({ tables }) => this.setState({ tables }), 15000);
  }

  show(pipeline) {
    const { name, last, runs } = pipeline;
    const model = pipeline.kind === "model";
    return html`
      <${Title} kind=${model ? "Model" : "Pipeline"} name=${name} about=${pipeline.description}>
        <${Status} status=${pipeline.status} />
        ${pipeline.paused_at && html`<${Chip} kind="warn">paused <${Time} relative at=${pipeline.paused_at} /><//>`}
        ${pipeline.paused_at
          ? html`<${Resume} key="resume" name=${name} />`
          : html`<${Pause} key="pause" name=${name} />`}
        ${model && html`<${Backfill} key="backfill" name=${name} path=${`${this.path()}/backfill`} />`}
        ${pipeline.status !== "running" && html`<${Action} key="run" primary label=${FAILED.includes(pipeline.status) ? "Retry" : "Run now"} path=${`${this.path()}/run`} command=${`weft run ${quoted(name)}`} what=${RUNS(name, ` It writes to ${pipeline.targets.join(", ")}.`)} />`}
      <//>
      <${ActionsOff} commands=${[`weft run ${quoted(name)}`, `weft ${pipeline.paused_at ? "resume" : "pause"} ${quoted(name)}`]} />
      ${last?.error && pipeline.status !== "succeeded" && html`<${Panel} id="error" title="Why it failed"><pre class="code bad-text">${last.error}</pre><p class="foot top-gap"><a href=${to("runs", last.run_id)}>The run and its log</a> <span class="note">Once the cause is mended:</span> <${Command} text=${`weft run ${quoted(name)}`} /><${Commands} text=${last.error} /></p><//>`}
      <${Panel} id="stands" title="How it stands">
        <${Facts} facts=${[
          ["Now", pipeline.due_since ? html`${pipeline.state} <span class="note">since <${Time} relative at=${pipeline.due_since} /></span>` : pipeline.state],
          ["Next due", pipeline.next_due && html`<${Time} at=${pipeline.next_due} /> <span class="note line-up">${until(pipeline.next_due)}</span>`],
          ["Last success", pipeline.succeeded_at ? html`<${Time} relative at=${pipeline.succeeded_at} />` : "never"],
          ["Failures in a row", pipeline.failures ? count(pipeline.failures) : null],
          ["Schedule", pipeline.schedule || (model ? "with its inputs" : "by hand")],
          ["Mode", pipeline.mode],
          ["Writes", pipeline.targets.join(", ")],
          ["Reads", pipeline.inputs.join(", ")],
          ["After", pipeline.depends_on.length > 0 && names(pipeline.depends_on, "pipelines")],
          ["Before", pipeline.dependents.length > 0 && names(pipeline.dependents, "pipelines")],
          ["Attempts allowed", pipeline.attempts_allowed],
          ["Owner", pipeline.owner],
          ["Tags", pipeline.tags.join(", ")],
          ["Declared", pipeline.declared],
          ["Who did what", html`<a href=${to("audit", name)}>the audit log</a>`],
        ]} />
      <//>
      ${model && html`<${ModelPanels} key=${name} name=${name} />`}
      <${Panel} id="runs" title="Last runs" note=${runs.length ? "The newest on the right; the height is the duration" : ""}>
        ${runs.length
          ? html`
              <${Timeline} runs=${[...runs].reverse()} />
              <${RunCharts} runs=${runs} />
              <${Table} label="Last runs" head=${[["Run"], ["Status"], ["Took", "number"], ["Read", "number medium"], ["Changed", "number medium"], ["Quarantined", "number wide"], ["Why", "wide"]]}>
                ${runs.map((run) => html`<${RunRow} key=${`${run.run_id} ${run.attempt}`} run=${run} />`)}
              <//>
            `
          : html`<${Empty} title="It never ran."><p><${Command} text=${`weft run ${quoted(name)}`} /></p><//>`}
      <//>
      ${this.state.tables?.map((each) => html`<${Aside} key=${each.table} pipeline=${name} ...${each} />`)}
      ${model && html`<${Plan} name=${name} />`}
      ${pipeline.code && html`<${Panel} id="code" title="Code" note=${pipeline.declared}><${Code} label="Code" text=${pipeline.code} /><//>`}
    `;
  }
}

// The rows that a target rejected, by error.
const Aside = ({ table, count: number, groups, pipeline }) =>
  number > 0 &&
  html`
    <${Panel} id=${`aside-${table}`} title="Quarantined rows" note=${`${count(number)} in ${table}`}>
      <${ActionsOff} commands=${[`weft quarantine replay ${quoted(pipeline)} --all`]} />
      <${Table} stacked label=${`Rows in ${table} by error`} head=${[["Error"], ["Rows", "number"], ["Actions", "end"]]}>
        ${groups.map((each) => html`
          <tr key=${each.group}>
            <th scope="row">${each.error}<details class="why"><summary>One of them</summary><pre>${each.payload}</pre></details></th>
            <td class="number" data-unit=${each.count === 1 ? "row" : "rows"}>${count(each.count)}</td>
            <td class="end"><${ReplayRows} pipeline=${pipeline} group=${each} /> <${PurgeRows} pipeline=${pipeline} group=${each} /></td>
          </tr>
        `)}
      <//>
      <p class="foot top-gap"><${ReplayRows} pipeline=${pipeline} label="Replay all" /> <${PurgeRows} pipeline=${pipeline} label="Purge all" /> <${Command} text=${`weft sql ${quoted(`SELECT * FROM ${table}`)}`} /></p>
    <//>
  `;

const iso = (value) => (value && !Number.isNaN(Date.parse(value)) ? new Date(value).toISOString() : null);

// A range of time of a model, built again.
const Backfill = ({ name, path }) => html`
  <${Action} label="Backfill" plan path=${path} inputs=${[["since", "Published since"], ["until", "Until (by default now)"]]}
    body=${({ since, until }) => (iso(since) ? { since: iso(since), ...(iso(until) ? { until: iso(until) } : {}) } : null)}
    command=${({ since, until }) => `weft backfill ${quoted(name)} --since ${iso(since) || "TIME"}${iso(until) ? ` --until ${iso(until)}` : ""}`}
    what=${(plan) => html`
      <p>${Object.entries(plan.events).map(([stream, number]) => html`<strong key=${stream}>${plural(number, "event")}</strong> of ${stream} `)} ${plan.others.length > 0 && `and all of ${plan.others.join(", ")} `}are read again, and the rows are merged into ${plan.target} by its key. What the next build reads is not changed.</p>
    `} />
`;

// What has changed in the declaration of a model since it was built.
class Plan extends View {
  every = 30000;
  path = () => `${api(this.props.name)}/plan`;

  render(props, { data, missing }) {
    const step = data?.step;
    const lines = step ? [...Object.entries(step.added).map(([name, kind]) => `+ ${name} ${kind}`), ...step.dropped.map((name) => `- ${name}`), ...Object.entries(step.retyped).map(([name, [before, after]]) => `~ ${name} ${before} → ${after}`), ...[step.unknown, step.problem && `problem: ${step.problem}`].filter(Boolean)] : [];
    return html`
      <${Panel} id="plan" title="Plan" note="what has changed in its declaration since it was built">
        ${missing
          ? html`<p class="foot note">${missing.message} ${missing.hint}</p>`
          : html`<p class="foot">${!data ? "Loading …" : !step ? "Nothing. What is new in its inputs is above, in its state." : html`<${Chip} kind="warn">${step.change}<//> ${step.outcome}${step.rows == null ? "" : `, ${plural(step.rows, "row")} now`}`}</p>`}
        ${lines.length > 0 && html`<${Code} label="Columns" text=${lines.join("\n")} />`}
        ${(step || missing) && html`<p class="foot top-gap"><${Command} text="weft plan" /></p>`}
      <//>
    `;
  }
}

// How long the last runs took, and how many rows they changed.
function RunCharts({ runs }) {
  const ended = runs.filter((run) => run.seconds != null && run.status === "succeeded").reverse();
  if (ended.length < 3) return null;
  const at = (run) => new Date(run.started_at) / 1000;
  const [first, now] = [at(ended[0]), at(ended.at(-1))];
  const span = Math.max(10, now - first);
  const took = [{ name: "Took", points: ended.map((run) => [at(run), run.seconds]) }];
  const rows = [
    { name: "Read", points: ended.filter((run) => run.rows_read != null).map((run) => [at(run), run.rows_read]) },
    { name: "Changed", points: ended.map((run) => [at(run), changes(run)]) },
  ];
  return html`
    <div class="charts">
      <${Chart} title="Duration" low lines=${took} now=${now} span=${span} say=${duration} tick=${briefDuration} least=${0.05} label="How long the last runs took" />
      <${Chart} title="Rows" low lines=${rows} now=${now} span=${span} say=${count} label="Rows of the last runs" />
    </div>
  `;
}

const RunRow = ({ run }) => html`
  <tr>
    <th scope="row"><a href=${to("runs", run.run_id)}><${Time} at=${run.started_at} /></a>${run.attempt > 1 && html`<span class="note"> attempt ${run.attempt}</span>`}</th>
    <td><${Status} status=${run.status} /></td>
    <td class="number">${duration(run.seconds)}</td>
    <td class="number medium">${count(run.rows_read)}</td>
    <td class="number medium">${changed(run)}</td>
    <td class="number wide">${count(run.quarantined)}</td>
    <td class="wide note cut">${(run.error || run.reason || "").split("\n")[0]}</td>
  </tr>
`;

const TOOK = ["rows_read", "inserted", "updated", "unchanged", "deleted", "quarantined", "late"];

export class Run extends View {
  every = 2000;
  path = () => `api/v1/runs/${encodeURIComponent(this.props.id)}`;

  show({ pipeline, run_id: id, attempts, retryable }) {
    const last = attempts.at(-1);
    return html`
      <${Title} kind="Run" name=${id} about=${html`of <a href=${to("pipelines", pipeline)}>${pipeline}</a>${last.slot ? html`, due <${Time} at=${last.slot} />` : ""}`}>
        <${Status} status=${last.status} />
        ${last.status === "running" && html`<${Action} label="Cancel" path=${`${this.path()}/cancel`} command=${`weft runs cancel ${quoted(id)}`} what="It ends within 20 seconds, wherever it runs, and is not tried again. What is not committed is undone." />`}
        ${retryable && html`<${Action} primary label="Retry" path=${`${api(pipeline)}/run`} command=${`weft run ${quoted(pipeline)}`} what=${RUNS(pipeline, "")} />`}
      <//>
      ${(retryable || last.status === "running") && html`<${ActionsOff} commands=${[retryable ? `weft run ${quoted(pipeline)}` : `weft runs cancel ${quoted(id)}`]} />`}
      ${[...attempts].reverse().map(
        (each) => html`
          <${Panel} key=${each.attempt} id=${`attempt-${each.attempt}`} title=${each.attempt ? `Attempt ${each.attempt}` : "Skipped"} note=${plural(attempts.length, "attempt")}>
            <${Facts} facts=${[
              ["Status", html`<${Status} status=${each.status} />`],
              ["Started", html`<${Time} at=${each.started_at} />`],
              ["Took", duration(each.seconds)],
              ["Done", WHERE[each.engine]],
              ["Where", each.host && `process ${each.pid} on ${each.host}`],
              ["Tried again", each.retry_at && html`<${Time} at=${each.retry_at} />`],
              ...TOOK.map((name) => [name === "rows_read" ? "Read" : name[0].toUpperCase() + name.slice(1), each[name] ? count(each[name]) : null]),
            ]} />
            ${(each.error || each.reason) && html`<pre class="code bad-text">${each.error || each.reason}</pre>`}
            ${retryable && each === last && html`<p class="foot top-gap"><span class="note">Once the cause is mended:</span> <${Command} text=${`weft run ${quoted(pipeline)}`} /><${Commands} text=${each.error} /></p>`}
            ${each.targets.length > 0 &&
            html`<${Table} label="Targets" head=${[["Target"], ["Read", "number"], ["Inserted", "number"], ["Updated", "number medium"], ["Deleted", "number medium"], ["Took", "number medium"]]}>
              ${each.targets.map((one) => html`<tr key=${one.target}><th scope="row">${one.target}</th><td class="number">${count(one.rows_read)}</td><td class="number">${count(one.inserted)}</td><td class="number medium">${count(one.updated)}</td><td class="number medium">${count(one.deleted)}</td><td class="number medium">${duration(one.seconds)}</td></tr>`)}
            <//>`}
            ${each.attempt > 0 && html`<${Log} run=${id} attempt=${each.attempt} ended=${each.status !== "running"} pipeline=${pipeline} />`}
          <//>
        `,
      )}
    `;
  }
}

// The log of an attempt, as it comes.
class Log extends View {
  every = 1500;
  state = { text: "", next: null, ended: false, known: false };

  path = () => `api/v1/runs/${encodeURIComponent(this.props.run)}/log?attempt=${this.props.attempt}${this.state.next === null ? "" : `&after=${this.state.next}`}`;

  componentDidMount() {
    this.ask();
  }

  componentWillUnmount() {
    clearTimeout(this.timer);
    this.gone = true;
  }

  async ask() {
    let ended = false;
    try {
      const part = await askJson(this.path());
      if (this.gone) return;
      ended = part.ended || part.text === null;
      this.setState(({ text }) => ({ text: text + (part.text ?? ""), next: part.text === null ? null : part.next, known: part.text !== null, ended }));
    } catch {
      // The view itself says that the service does not answer.
    }
    if (!ended && !this.gone) this.timer = setTimeout(() => this.ask(), this.every);
  }

  render({ pipeline, run }, { text, ended, known }) {
    return html`
      <h3 class="sub">Log${ended || !known ? "" : " (live)"}</h3>
      ${text ? html`<${Code} label="Log" text=${text} />` : html`<p class="foot note">${ended && !known ? "This machine has no log of it. On the machine that ran it: " : "Nothing was written yet."}${ended && !known && html`<${Command} text=${`weft logs ${quoted(pipeline)} --run ${run}`} />`}</p>`}
    `;
  }
}
