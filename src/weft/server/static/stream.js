// One stream: its fields, size and rate, who reads it, what was rejected, and its events as they come.

import { ActionsOff } from "./actions.js";
import { Chart, SPAN_DAY, Series, rates } from "./chart.js";
import { bytes, count, duration, plural, rate } from "./dom.js";
import { PurgePlace, ReplayPlace } from "./letters.js";
import { names } from "./pipelines.js";
import { Publish } from "./publish.js";
import { me } from "./status.js";
import { behind } from "./streaming.js";
import { Tail } from "./tail.js";
import { Chip, Component, Empty, Facts, NameLink, Panel, Table, Time, Title, View, html, quoted, to } from "./ui.js";

export class StreamView extends View {
  every = 2000;
  series = new Series();
  place = `api/v1/streams/${encodeURIComponent(this.props.name)}`;
  path = () => `${this.place}${this.state.data ? "" : "?history=true"}`;

  componentDidMount() {
    super.componentDidMount();
    this.also(`${this.place}/groups`, ({ groups }) => this.setState({ groups }), 3000);
    this.also(`${this.place}/history?hours=24`, ({ points, at }) => this.setState({ day: points, dayAt: new Date(at) / 1000 }), 60000);
    this.also(`${this.place}/rejected`, ({ groups }) => this.setState({ rejected: groups }), 10000);
  }

  // Pipelines and models that read it, with a key that may read every stream.
  componentDidUpdate() {
    if (this.asked || !me().reads_all) return;
    this.asked = true;
    this.also("api/v1/graph", (graph) => this.setState({ graph }), 60000);
    this.also("api/v1/streaming", ({ pipelines }) => this.setState({ streaming: pipelines }), 6000);
  }

  readers({ name }) {
    const { graph = { nodes: [], edges: [] }, streaming = [] } = this.state;
    const ids = new Set(graph.edges.filter((each) => each.from === `stream:${name}`).map((each) => each.to));
    return graph.nodes.filter((each) => ids.has(each.id)).map((each) => ({ ...each, standing: streaming.find((one) => each.kind === "streaming" && one.name === each.name) }));
  }

  show(stream) {
    const { groups = [], rejected = [], day = [], dayAt = 0 } = this.state;
    const readers = this.readers(stream);
    for (const [at, published] of stream.history || []) this.series.add(at, published);
    const at = new Date(stream.at) / 1000;
    this.series.add(at, stream.published);
    const fields = Object.entries({ ...stream.fields, ...stream.columns });
    const aside = [
      ["Dead letters", stream.dead_letters, stream.dead_letter_stream],
      ["Quarantined", stream.quarantined, stream.quarantine_stream],
    ].filter(([, number]) => number !== null);
    const some = aside.filter(([, number]) => number > 0);
    return html`
      <${Title} kind="Stream" name=${stream.name} about=${stream.description}>
        ${stream.tags.map((tag) => html`<${Chip} key=${tag}>${tag}<//>`)}
        ${stream.auth && html`<${Chip}>closed by ${stream.auth.replace("_", " ")}<//>`}
      <//>
      ${stream.holds_rejected_of.length > 0 && stream.row_count > 0 && html`
        <${Panel} id="holds" title="Rejected events" note=${html`of ${names(stream.holds_rejected_of, "streams")}, whose views have the reasons`}>
          <p class="foot"><${ReplayPlace} place=${stream.name} /> <${PurgePlace} place=${stream.name} /></p>
          <${ActionsOff} commands=${[`weft streams replay ${quoted(stream.name)}`]} />
        <//>
      `}
      <${Panel} id="stands" title="How it stands">
        <${Facts} facts=${[
          ["Events per second", rate(this.series.now())],
          ["Stored", count(stream.row_count)],
          ["Size", stream.size_bytes == null ? html`<span title="The database does not say how much it takes up.">–</span>` : `about ${bytes(stream.size_bytes)}`],
          ["Last offset", stream.head_text],
          ["Removed up to", stream.floor_text === "0" ? null : stream.floor_text],
          ["Retention", retention(stream.retention)],
          ["New fields", stream.on_schema_drift],
          ["Owner", stream.owner],
          ["Who did what", me().may_act && html`<a href=${to("audit", stream.name)}>the audit log</a>`],
          ...aside.map(([title, number, name]) => [title, html`<a href=${to("streams", name)}>${count(number)}</a>`]),
        ]} />
        <${Chart} title="Events per second" lines=${[{ name: "Events", points: this.series.points() }]} now=${at} />
      <//>
      ${day.length > 1 && html`
        <${Panel} id="day" title="The last day" note="a point a minute">
          <div class="charts">
            ${charts(day).map(([title, lines, say]) => html`<${Chart} key=${title} title=${title} low lines=${lines} now=${dayAt} span=${SPAN_DAY} say=${say} label=${`${title} over the last day`} />`)}
          </div>
        <//>
      `}
      <${Panel} id="consumers" title="Consumers" note=${groups.length + readers.length ? "" : "Nobody has read it under a name yet."}>
        ${groups.length + readers.length > 0 && html`
          <${Table} label="Consumers" head=${[["Consumer"], ["Lag", "number"], ["Not acknowledged", "number medium"], ["Lost", "number medium"], ["Position", "number wide"], ["Members", "wide"]]}>
            ${groups.map((each) => html`
              <tr key=${each.consumer}>
                <th scope="row" class="strong">${each.consumer}</th>
                <td class=${`number ${each.lag > 0 ? "loud" : ""}`}>${count(each.lag)}</td>
                <td class="number medium">${count(each.pending)}</td>
                <td class="number medium">${count(each.lost)}</td>
                <td class="number wide">${each.position_text}</td>
                <td class="wide note">${each.members.map((member) => member.member).join(", ")}</td>
              </tr>
            `)}
            ${readers.map(({ id, kind, name, standing }) => html`
              <tr key=${id}>
                <th scope="row"><${NameLink} href=${to(kind === "streaming" ? kind : "pipelines", name)} name=${name} /> <${Chip}>${kind}<//></th>
                <td class=${`number ${standing && behind(standing, stream.name) > 0 ? "loud" : ""}`}>${count(standing && behind(standing, stream.name))}</td>
                <td class="number medium">–</td>
                <td class="number medium">–</td>
                <td class="number wide">–</td>
                <td class="wide note">${standing?.activity?.failure ? "failing" : standing && !standing.running && "not running"}</td>
              </tr>
            `)}
          <//>
        `}
      <//>
      ${rejected.length > 0 && html`
        <${Panel} id="rejected" title="Rejected events" note="by their reasons, of the newest 2,000">
          ${some.map(([title, number, place]) => html`<p key=${place} class="foot">${title}: ${count(number)} <${ReplayPlace} place=${place} label="Replay all" /> <${PurgePlace} place=${place} label="Purge all" /></p>`)}
          <${ActionsOff} commands=${some.map(([, , place]) => `weft streams replay ${quoted(place)}`)} />
          <${Table} stacked label="Rejected events by reason" head=${[["Reason"], ["Events", "number"], ["What", "medium"], ["Newest", "number medium"], ["Actions", "end"]]}>
            ${rejected.map((each) => html`
              <tr key=${each.group}>
                <th scope="row">${each.reason}<details class="why"><summary>One of them</summary><pre>${each.payload}</pre></details></th>
                <td class="number" data-unit=${each.count === 1 ? "event" : "events"}><a href=${to("streams", each.stream)}>${count(each.count)}</a></td>
                <td class="medium"><${Chip} kind="warn">${each.kind}<//> <span class="note">${each.of}</span></td>
                <td class="number medium"><${Time} relative at=${each.newest} /></td>
                <td class="end"><${ReplayPlace} place=${each.stream} group=${each} /> <${PurgePlace} place=${each.stream} group=${each} /></td>
              </tr>
            `)}
          <//>
        <//>
      `}
      <${Panel} id="fields" title="Fields">
        ${fields.length
          ? html`
              <${Table} label="Fields" head=${[["Field"], ["Type"], ["Declared"]]}>
                ${fields.map(([name, kind]) => html`<tr key=${name}><th scope="row"><code>${name}</code></th><td class="line-up"><code>${kind}</code></td><td class="note">${name in stream.fields ? "declared" : "came with an event"}</td></tr>`)}
              <//>
            `
          : html`<${Empty} title="It has no fields yet."><p>The first event brings them.</p><//>`}
      <//>
      ${/* What people publish there would be no rejected event, at which a replay stops. */ !stream.holds_rejected_of.length && html`<${Publish} stream=${stream} />`}
      <${LiveTail} name=${stream.name} tail=${stream.tail} />
    `;
  }
}

// Of points [at, published, lag, dead letters, quarantined].
function charts(day) {
  const of = (index, name) => ({ name, points: day.map((point) => [point[0], point[index]]).filter(([, value]) => value != null) });
  const aside = [of(3, "Dead letters"), of(4, "Quarantined")].filter(({ points }) => points.length);
  const some = (line) => line.points.some(([, value]) => value > 0);
  return [
    ["Events per second", [{ name: "Events", points: rates(day) }]],
    some(of(2)) && ["Lag of the slowest consumer", [of(2, "Lag")], (value) => plural(value, "event")],
    aside.some(some) && ["Rejected events", aside, count],
  ].filter(Boolean);
}

function retention({ max_age_days: days, max_rows: most }) {
  const parts = [days != null && duration(days * 86400), most != null && `${count(most)} events`].filter(Boolean);
  return parts.length ? `the last ${parts.join(", ")}` : "kept indefinitely";
}

class LiveTail extends Component {
  componentDidMount() {
    const part = (name) => this.element.querySelector(`[data-part="${name}"]`);
    const elements = { list: part("list"), status: part("status"), input: part("input"), button: part("button") };
    this.tail = new Tail(elements, () => ({ tail: this.props.tail }), this.props.name);
    this.tail.open();
  }

  componentWillUnmount() {
    this.tail.close();
  }

  // Its elements are the tail's own from then on.
  shouldComponentUpdate() {
    return false;
  }

  render() {
    return html`
      <section class="panel" aria-labelledby="live-title" ref=${(element) => (this.element = element)}>
        <div class="head">
          <h2 id="live-title">Live tail</h2>
          <form class="controls">
            <label class="field">Only where <input data-part="input" placeholder="field=value" autocomplete="off" spellcheck=${false} size="16" /></label>
            <button type="button" data-part="button" aria-pressed="false">Pause</button>
          </form>
        </div>
        <p class="note status" data-part="status" role="status"></p>
        <ol class="tail" data-part="list" aria-labelledby="live-title" tabindex="0"></ol>
      </section>
    `;
  }
}
