// Streaming pipelines: how far each has come, what waits, and what was rejected.

import { Chart, SPAN_DAY, Series, rates } from "./chart.js";
import { briefDuration, count, duration, plural, rate } from "./dom.js";
import { Chip, Code, Command, Commands, Empty, Facts, NameLink, Panel, Table, Tile, Time, Title, View, html, quoted, to } from "./ui.js";

const places = (list) => list.map((each) => each.name).join(", ");
function Standing({ running, activity }) {
  // Started again it may be well, and have no rows yet: only a batch says so.
  if (activity?.failure) return html`<${Chip} kind="bad">✕${"\u00a0"}failing<//>`;
  return running ? html`<${Chip} kind="good">●${"\u00a0"}running<//>` : html`<${Chip}>not${"\u00a0"}running<//>`;
}

// Rates of a pipeline, by what it wrote about itself.
class Flow {
  constructor() {
    this.in = new Series();
    this.out = new Series();
  }

  add(at, rowsIn, rowsOut) {
    // It began anew, with another checkpoint.
    if (rowsIn < this.in.seen.at(-1)?.[1]) [this.in, this.out] = [new Series(), new Series()];
    this.in.add(at, rowsIn);
    this.out.add(at, rowsOut);
  }

  stands({ running, activity }) {
    this.running = Boolean(running);
    if (activity) for (const each of [this.in.seen.length ? null : activity.before, activity]) if (each) this.add(new Date(each.at) / 1000, each.rows_in, each.rows_out);
  }

  say = (series) => (this.running ? rate(series.now()) : "–");
}

// Of all its sources, or of one; null where that is not known.
export function behind({ lag }, source) {
  const lags = lag.filter((each) => each.lag !== null && (!source || each.source === source));
  return lags.length ? lags.reduce((sum, each) => sum + each.lag, 0) : null;
}

export class StreamingPipelines extends View {
  path = () => "api/v1/streaming";
  flows = new Map();

  componentDidMount() {
    super.componentDidMount();
    this.also("api/v1/state", ({ states }) => this.setState({ states }), 8000);
  }

  show({ pipelines, at }) {
    const now = new Date(at);
    for (const each of pipelines) {
      if (!this.flows.has(each.name)) this.flows.set(each.name, new Flow());
      this.flows.get(each.name).stands(each);
    }
    const head = [["Pipeline"], ["State"], ["From and to", "wide"], ["Rows in/s", "number medium"], ["Rows out/s", "number wide wider"], ["Batch time", "number medium"], ["Lag", "number"], ["Rejected", "number medium"], ["Last batch", "number wide wider"]];
    return html`
      <${Title} name="Streaming pipelines" />
      <section class="panel">
        ${pipelines.length
          ? html`
              <${Table} label="Streaming pipelines" head=${head}>
                ${pipelines.map((each) => {
                  const { activity } = each, flow = this.flows.get(each.name), lag = behind(each);
                  return html`
                    <tr key=${each.name}>
                      <th scope="row"><${NameLink} href=${to("streaming", each.name)} name=${each.name} />${each.step && html` <${Chip}>${each.step}<//>`}<span class="note block">${each.description}</span></th>
                      <td><${Standing} ...${each} />${each.problem && html`<span class="note block">${each.problem}</span>`}${activity?.failure && html`<span class="note two-lines medium">${activity.failure.error.split("\n")[0]}</span>`}</td>
                      <td class="wide">${places(each.sources)}<span class="block">→${"\u00a0"}${places(each.targets)}</span></td>
                      <td class="number medium">${flow.say(flow.in)}</td>
                      <td class="number wide wider">${flow.say(flow.out)}</td>
                      <td class="number medium">${duration(activity?.last?.seconds)}</td>
                      <td class=${`number ${lag > 0 ? "loud" : ""}`}>${count(lag)}</td>
                      <td class=${`number medium ${activity?.dead_letters ? "loud" : ""}`}>${count(activity?.dead_letters)}</td>
                      <td class="number wide wider"><${Time} relative at=${each.last_batch} now=${now} /></td>
                    </tr>
                  `;
                })}
              <//>
            `
          : html`<${Empty} title="No streaming pipeline is declared."><p>They carry rows from streams, topics and files to tables, in small batches.</p><//>`}
      </section>
      ${this.state.states?.length > 0 && html`<${States} states=${this.state.states} />`}
    `;
  }
}

export class StreamingPipeline extends View {
  path = () => `api/v1/streaming/${encodeURIComponent(this.props.name)}`;
  flow = new Flow();

  componentDidMount() {
    super.componentDidMount();
    const show = ({ points, at }) => {
      for (const [moment, rowsIn, rowsOut] of points.slice(-31)) this.flow.add(moment, rowsIn, rowsOut);
      this.setState({ day: points, dayAt: new Date(at) / 1000 });
    };
    this.also(`${this.path()}/history?hours=24`, show, 20000);
  }

  show(pipeline) {
    const { name, watermark, state, activity, dead_letters: letters } = pipeline;
    const { day = [], dayAt = 0 } = this.state;
    const now = new Date(pipeline.at);
    const lag = behind(pipeline);
    const partitions = pipeline.lag.flatMap((each) => Object.entries(each.partitions ?? {}).map(([partition, behind]) => ({ ...each, partition, behind })));
    this.flow.stands(pipeline);
    return html`
      <${Title} kind="Streaming pipeline" name=${name} about=${pipeline.description}><${Standing} ...${pipeline} /><//>
      ${pipeline.problem && html`<p class="banner">${pipeline.problem} <${Commands} text=${pipeline.problem} /></p>`}
      ${activity?.failure && html`<${Panel} id="error" title="Why it failed" note=${html`${activity.failure.times > 1 && html`${count(activity.failure.times)} failures since <${Time} at=${activity.failure.since} />, the last `}<${Time} relative at=${activity.failure.at} now=${now} />`}><pre class="code bad-text">${activity.failure.error}</pre><p class="foot top-gap">${!pipeline.running && html`<span class="note">Once the cause is mended:</span> <${Command} text=${`weft consume ${quoted(name)}`} />`}<${Commands} text=${activity.failure.error} /></p><//>`}
      <section class="tiles" aria-label="In short">
        <${Tile} title="Rows in per second" note=${activity ? `${count(activity.rows_in)} in all` : "nothing recorded yet"}>${this.flow.say(this.flow.in)}<//>
        <${Tile} title="Rows out per second" note=${activity ? `${count(activity.rows_out)} in all` : ""}>${this.flow.say(this.flow.out)}<//>
        <${Tile} title="Batch time" note=${activity?.last ? `batch ${count(activity.last.batch)}, ${plural(activity.last.rows_in, "row")}` : ""}>${duration(activity?.last?.seconds)}<//>
        <${Tile} title="Lag" loud=${lag > 0 && !(pipeline.running && !activity?.failure)} note=${pipeline.lag.map((each) => each.words).filter(Boolean).join(", ")}>${count(lag)}<//>
        ${state && html`<${Tile} title="Rows in the state" note=${state.windows == null ? "" : plural(state.windows, pipeline.step) + " open"}>${count(state.rows)}<//>`}
        ${(letters || activity?.dead_letters > 0) && html`<${Tile} title="Dead letters" loud=${letters?.count > 0} note=${activity ? `${count(activity.dead_letters)} rejected in all` : ""}>${letters?.count == null ? "–" : `${count(letters.count)}${letters.more ? "+" : ""}`}<//>`}
      </section>
      ${day.length > 1 && html`<${Day} points=${day} now=${dayAt} />`}
      <${Panel} id="stands" title="How it stands">
        <${Facts} facts=${[
          ["Last batch", pipeline.last_batch ? html`<${Time} relative at=${pipeline.last_batch} now=${now} />` : "none yet"],
          ["Batches done", pipeline.committed == null ? null : count(pipeline.committed + 1)],
          ["In flight", pipeline.planned != null && pipeline.planned !== pipeline.committed && `batch ${count(pipeline.planned)}`],
          ["Process", pipeline.running],
          ["Trigger", pipeline.every_seconds == null ? "when the last batch is done" : `every ${pipeline.every_seconds} s`],
          ["Delivery", pipeline.delivery.replaceAll("_", " ")],
          ["Writes", pipeline.targets.map((each) => `${each.name} (${each.mode})`).join(", ")],
          ["Declared", pipeline.declared],
        ]} />
        ${!pipeline.running && !activity?.failure && html`<p class="foot"><${Command} text=${`weft consume ${quoted(name)}`} /></p>`}
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
        ${partitions.length > 0 && html`
          <h3 class="sub">Lag by partition</h3>
          <ul class="bars">
            ${partitions.map((each) => html`
              <li key=${`${each.source} ${each.partition}`}>
                <span>${pipeline.lag.length > 1 ? `${each.source} ` : ""}${each.partition}</span>
                <meter min="0" max=${Math.max(1, ...partitions.map(({ behind }) => behind))} value=${each.behind} aria-label=${`Lag of partition ${each.partition}`}></meter>
                <span class="number">${count(each.behind)}</span>
              </li>
            `)}
          </ul>
        `}
      <//>
      ${(watermark || pipeline.state_problem) && html`
        <${Panel} id="state" title="State" note=${watermark && closing(pipeline.step, watermark.lateness_ms)}>
          ${pipeline.state_problem && html`<p class="foot"><span class="note">${pipeline.state_problem}</span> <${Commands} text=${pipeline.state_problem} /></p>`}
          ${watermark && html`<${Facts} facts=${[
            ["Watermark", watermark.watermark ? html`<${Time} at=${watermark.watermark} />` : "none yet"],
            ["Held by", pipeline.running ? watermark.held_by.join(", ") : "the pipeline, which is not running"],
            [pipeline.step === "join" ? "Oldest rows kept until" : `Next ${pipeline.step} ends`, watermark.next_window_ends && html`<${Time} at=${watermark.next_window_ends} />`],
            ["Closes with a row at", watermark.next_window_ends && html`<${Time} at=${closes(watermark, watermark.next_window_ends)} /> ${watermark.held_by.length > 0 && html`<span class="note">or later, of ${watermark.held_by.join(" and of ")}</span>`}`],
            [OPEN[pipeline.step], state?.windows == null ? null : count(state.windows)],
            ["Rows in the state", count(state?.rows)],
          ]} />`}
          ${pipeline.waiting.length > 0 && html`<${Waiting} step=${pipeline.step} watermark=${watermark} waiting=${pipeline.waiting} total=${state.windows ?? pipeline.waiting.length} />`}
        <//>
      `}
      ${pipeline.verified && html`<${Mirror} name=${name} cdc=${activity?.cdc} verified=${pipeline.verified} now=${now} />`}
      ${letters && html`<${Letters} letters=${letters} name=${name} />`}
      ${pipeline.sql && html`<${Panel} id="sql" title="SQL" note=${pipeline.declared}><${Code} label="SQL" text=${pipeline.sql} /><//>`}
    `;
  }
}

const closes = (watermark, end) => end && new Date(new Date(end).getTime() + watermark.lateness_ms);

// What windows and joins keep, and what holds them up.
const States = ({ states }) => html`
  <${Panel} id="states" title="State" note="what windows and joins keep between batches">
    <${Table} label="State" head=${[["Pipeline"], ["Open", "number"], ["Rows", "number medium"], ["Watermark", "medium"], ["Held by"], ["Next closes with a row at", "number medium"]]}>
      ${states.map(({ pipeline, step, state, watermark, state_problem: problem }) => html`
        <tr key=${pipeline}>
          <th scope="row"><${NameLink} href=${to("streaming", pipeline)} name=${pipeline} /> <${Chip}>${step}<//>${problem && html`<span class="note block">${problem}</span>`}</th>
          <td class="number">${count(state?.windows)}</td>
          <td class="number medium">${count(state?.rows)}</td>
          <td class="medium"><${Time} at=${watermark?.watermark} /></td>
          <td>${watermark?.held_by.join(", ") || "–"}</td>
          <td class="number medium"><${Time} at=${closes(watermark, watermark?.next_window_ends)} /></td>
        </tr>
      `)}
    <//>
  <//>
`;

function closing(step, lateness) {
  const row = `at least ${duration(lateness / 1000)} later than`;
  if (step === "join") return `A row is kept until each source has had one that is ${lateness ? row : "as late as"} the time here.`;
  return `A ${step} closes when each source has had a row that is ${lateness ? row : "as late as"} its end.`;
}

const OPEN = { window: "Open windows", session: "Open sessions", join: "Rows that wait" };

const Waiting = ({ step, watermark, waiting, total }) => html`
  <h3 class="sub">${OPEN[step]}${waiting.length < total ? `, the oldest ${count(waiting.length)} of ${count(total)}` : ""}</h3>
  <${Table} label=${OPEN[step]} head=${[...(step === "window" ? [["Begins"]] : []), [step === "join" ? "Kept until" : "Ends"], ["Closes with a row at", "medium"], ["Rows", "number"]]}>
    ${waiting.map((each) => html`
      <tr key=${each.window_end ?? each.kept_until}>
        ${each.window_start && html`<td><${Time} at=${each.window_start} /></td>`}
        <td><${Time} at=${each.window_end ?? each.kept_until} /></td>
        <td class="medium"><${Time} at=${closes(watermark, each.window_end ?? each.kept_until)} /></td>
        <td class="number">${count(each.rows)}</td>
      </tr>
    `)}
  <//>
`;

const CHANGES = [["creates", "Created"], ["updates", "Updated"], ["deletes", "Deleted"], ["skipped", "Skipped"], ["idempotent_skipped", "Redelivered"]];

function Mirror({ name, cdc, verified, now }) {
  return html`
    <${Panel} id="cdc" title="Change data capture" note=${cdc ? "counts since the checkpoint began" : "No change was applied yet."}>
      ${cdc && html`<${Facts} facts=${[...CHANGES.map(([key, title]) => [title, count(cdc[key])]), ["Lag of the last change", cdc.lag_seconds == null ? null : duration(cdc.lag_seconds)]]} />`}
      ${verified.length > 0
        ? html`
            <h3 class="sub">Last comparison with the source</h3>
            <${Table} label="Last comparison with the source" head=${[["Mirror"], ["Found"], ["Rows", "number medium"], ["Mended", "number medium"], ["When", "number medium"]]}>
              ${verified.map((each) => html`
                <tr key=${each.target}>
                  <th scope="row" class="strong">${each.target}</th>
                  <td><${Chip} kind=${each.differ > each.mended ? "bad" : "good"}>${each.differ ? `${plural(each.differ, "row")} differ${each.differ === 1 ? "s" : ""}` : "✓ equal"}<//></td>
                  <td class="number medium">${count(each.rows)}</td>
                  <td class="number medium">${count(each.mended)}</td>
                  <td class="number medium"><${Time} relative at=${each.at} now=${now} /></td>
                </tr>
              `)}
            <//>
          `
        : html`<p class="foot note">It was not compared with its source yet.</p>`}
      <p class="foot top-gap"><${Command} text=${`weft cdc verify ${quoted(name)} --source CONNECTION`} /></p>
    <//>
  `;
}

// What services stored of it: [at, rows in, rows out, batches, milliseconds, dead letters, lag, state, watermark].
function Day({ points, now }) {
  const of = (index) => points.map((point) => [point[0], point[index]]).filter(([, value]) => value != null);
  const taken = points.slice(1).flatMap(([at, , , batches, busy], index) => (batches > points[index][3] ? [[at, (busy - points[index][4]) / (batches - points[index][3]) / 1000]] : []));
  const charts = [
    ["Rows per second", [{ name: "In", points: rates(of(1)) }, { name: "Out", points: rates(of(2)) }], (value) => `${rate(value)}/s`],
    ["Batch time", [{ name: "Batch time", points: taken }], duration, taken.length > 1, 0.2],
    ["Lag", [{ name: "Lag", points: of(6) }], count, of(6).some(([, value]) => value > 0)],
    ["Rows in the state", [{ name: "Rows", points: of(7) }], count, of(7).length > 1],
    ["Behind by the watermark", [{ name: "Behind", points: of(8).map(([at, watermark]) => [at, Math.max(0, at - watermark / 1000)]) }], duration, of(8).length > 1, 10],
    ["Rejected rows", [{ name: "Rejected", points: of(5) }], count, of(5).some(([, value]) => value > 0)],
  ].filter(([, , , wanted = true]) => wanted);
  return html`
    <${Panel} id="day" title="The last day" note="a point a minute; drag over a part to look closer">
      <div class="charts">
        ${charts.map(([title, lines, say, , least]) => html`<${Chart} key=${title} title=${title} low lines=${lines} now=${now} span=${SPAN_DAY} say=${say} tick=${least && briefDuration} least=${least} nothing="Nothing in the last day" label=${`${title} over the last day`} />`)}
      </div>
    <//>
  `;
}

const Letters = ({ letters, name }) => html`
  <${Panel} id="letters" title="Dead letters" note=${letters.count == null ? "" : `${count(letters.count)}${letters.more ? " and more" : ""}`}>
    ${letters.problem && html`<p class="foot"><span class="note">${letters.problem}</span> <${Commands} text=${letters.problem} /></p>`}
    ${letters.count === 0 && html`<p class="foot note">There are none.</p>`}
    ${letters.groups.length > 0 && html`
      <${Table} stacked label="Dead letters by error" head=${[["Error"], ["Rows", "number"], ["Stage", "medium"], ["Newest", "number medium"]]}>
        ${letters.groups.map((each) => html`
          <tr key=${`${each.stage} ${each.error}`}>
            <th scope="row">${each.error}<details class="why"><summary>One of them</summary><pre>${each.payload}</pre><${Command} text=${`weft dlq show ${quoted(name)} ${each.letter_id.slice(0, 12)}`} /></details></th>
            <td class="number" data-unit=${each.count === 1 ? "row" : "rows"}>${count(each.count)}</td>
            <td class="medium">${each.stage}</td>
            <td class="number medium"><${Time} relative at=${each.newest} /></td>
          </tr>
        `)}
      <//>
      <p class="foot top-gap"><a href=${to("letters", name)}>All of them, to replay or purge</a> <${Command} text=${`weft dlq replay ${quoted(name)} --all`} /></p>
    `}
  <//>
`;
