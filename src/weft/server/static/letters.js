// Dead letters and quarantines: what was put aside, by pipeline and stream, and by error.

import { indented } from "./api.js";
import { Action, ActionsOff } from "./actions.js";
import { count, plural } from "./dom.js";
import { Chip, Code, Command, Commands, Empty, Facts, NameLink, Panel, Table, Time, Title, View, html, quoted, to } from "./ui.js";

const several = (letters) => (letters.count == null ? "–" : `${count(letters.count)}${letters.more ? " and more" : ""}`);
const api = (name) => `api/v1/dead-letters/${encodeURIComponent(name)}`;

export class DeadLetters extends View {
  every = 6000;
  path = () => "api/v1/dead-letters";

  show({ pipelines, streams, quarantines, at }) {
    const now = new Date(at);
    return html`
      <${Title} name="Dead letters and quarantines" about="Rows and events that were put aside, with the reason, while the others went on." />
      <${Panel} id="pipelines-title" title="Streaming pipelines" note=${pipelines.length ? "" : "None has a place for dead letters."}>
        ${pipelines.length > 0 && html`
          <${Table} label="Dead letters of streaming pipelines" head=${[["Pipeline"], ["Letters", "number"], ["Newest", "number medium"], ["Most common error", "medium"]]}>
            ${pipelines.map((each) => html`
              <tr key=${each.pipeline}>
                <th scope="row"><${NameLink} href=${to("letters", each.pipeline)} name=${each.pipeline} /><span class="note block">${each.place}</span></th>
                <td class=${`number ${each.count ? "loud" : ""}`}>${several(each)}</td>
                <td class="number medium"><${Time} relative at=${each.newest} now=${now} /></td>
                <td class="medium note">${each.problem || each.groups[0]?.error}</td>
              </tr>
            `)}
          <//>
        `}
      <//>
      <${Panel} id="streams-title" title="Streams" note=${streams.length ? "" : "None has a quarantine, or max_deliveries."}>
        ${streams.length > 0 && html`
          <${Table} label="Rejected events of streams" head=${[["Stream"], ["What", "medium"], ["Events", "number"], ["Where", "medium"], ["Actions", "end"]]}>
            ${streams.map((each) => html`
              <tr key=${`${each.stream} ${each.kind}`}>
                <th scope="row"><${NameLink} href=${to("streams", each.stream)} name=${each.stream} /><span class="note narrow">${each.kind}</span>${each.count > 0 && html`<span class="note block">its view has them by reason</span>`}</th>
                <td class="medium">${each.kind}</td>
                <td class=${`number ${each.count ? "loud" : ""}`}>${count(each.count)}</td>
                <td class="medium"><a href=${to("streams", each.place)}>${each.place}</a></td>
                <td class="end">${each.count > 0 && html`<${ReplayPlace} place=${each.place} /> <${PurgePlace} place=${each.place} />`}</td>
              </tr>
            `)}
          <//>
        `}
      <//>
      ${quarantines.length > 0 && html`
        <${Panel} id="quarantines-title" title="Pipelines" note="rows that targets rejected, or that broke an expectation">
          <${Table} label="Quarantined rows of pipelines" head=${[["Pipeline"], ["Rows", "number"], ["Where", "medium"], ["Actions", "end"]]}>
            ${quarantines.map((each) => html`
              <tr key=${each.pipeline}>
                <th scope="row"><${NameLink} href=${to("pipelines", each.pipeline)} name=${each.pipeline} /><span class="note block">its view has them by error</span></th>
                <td class="number loud">${count(each.count)}</td>
                <td class="medium note">${each.tables.join(", ")}</td>
                <td class="end"><${ReplayRows} pipeline=${each.pipeline} /> <${PurgeRows} pipeline=${each.pipeline} /></td>
              </tr>
            `)}
          <//>
        <//>
      `}
    `;
  }
}

export class PipelineLetters extends View {
  path = () => api(this.props.name);

  show(letters) {
    const { pipeline, targets, groups } = letters;
    const now = new Date(letters.at);
    return html`
      <${Title} kind="Dead letters" name=${pipeline} about=${html`of the streaming pipeline <a href=${to("streaming", pipeline)}>${pipeline}</a>`}>
        ${letters.count > 0 && html`<${Replay} pipeline=${pipeline} body=${{ all: true }} words="--all" label="Replay all" primary /><${Purge} pipeline=${pipeline} body=${{ all: true }} words="--all" label="Purge all" />`}
      <//>
      ${letters.count > 0 && html`<${ActionsOff} commands=${[`weft dlq replay ${quoted(pipeline)} --all`]} />`}
      ${letters.problem && html`<p class="banner">${letters.problem} <${Commands} text=${letters.problem} /></p>`}
      <${Panel} id="stands" title="How it stands">
        <${Facts} facts=${[
          ["Letters", several(letters)],
          ["Newest", letters.newest && html`<${Time} relative at=${letters.newest} now=${now} />`],
          ["Where", letters.place],
          ["Replayed into", targets.join(", ")],
          ["Who did what", html`<a href=${to("audit", pipeline)}>the audit log</a>`],
        ]} />
      <//>
      ${groups.length > 0 && html`
        <${Panel} id="groups" title="By error" note=${letters.more ? `of ${plural(letters.count, "letter")} that were looked at` : ""}>
          <${Table} stacked label="Dead letters by error" head=${[["Error"], ["Rows", "number"], ["Stage", "medium"], ["Newest", "number medium"], ["Actions", "end"]]}>
            ${groups.map((each) => html`<${GroupRow} key=${each.group} group=${each} pipeline=${pipeline} now=${now} />`)}
          <//>
        <//>
      `}
      ${letters.letters.length > 0 && html`
        <${Panel} id="newest" title=${letters.more ? "Some of them" : "The newest"} note=${plural(letters.letters.length, "letter")}>
          <${Table} label="The newest dead letters" head=${[["Letter"], ["Failed", "number"], ["Batch", "number medium"], ["From", "medium"], ["Why", "wide"], ["Replays", "number wide"]]}>
            ${letters.letters.map((each) => html`
              <tr key=${each.letter_id}>
                <th scope="row"><a href=${to("letters", pipeline, each.letter_id)}><code>${each.letter_id.slice(0, 12)}</code></a></th>
                <td class="number"><${Time} relative at=${each.failed_at} now=${now} /></td>
                <td class="number medium">${count(each.batch)}</td>
                <td class="medium note">${[each.source, each.offset].filter(Boolean).join(" ")}</td>
                <td class="wide note cut">${each.error.trim().split("\n")[0]}</td>
                <td class="number wide">${count(each.replays)}</td>
              </tr>
            `)}
          <//>
        <//>
      `}
      ${letters.count === 0 && html`<${Empty} title="There are no dead letters."><p>Rows that cannot be read, transformed or stored appear here.</p><//>`}
    `;
  }
}

function GroupRow({ group, pipeline, now }) {
  // By the group alone: other errors may have the text of this one in theirs, and what is shown has no secrets.
  const body = { group: group.group };
  const words = `--group ${group.group}`;
  return html`
    <tr>
      <th scope="row">${group.error}<details class="why"><summary>One of them</summary><pre>${group.payload}</pre><a href=${to("letters", pipeline, group.letter_id)}>All of it</a></details></th>
      <td class="number" data-unit=${group.count === 1 ? "row" : "rows"}>${count(group.count)}</td>
      <td class="medium"><${Chip}>${group.stage}<//></td>
      <td class="number medium"><${Time} relative at=${group.newest} now=${now} /></td>
      <td class="end"><${Replay} pipeline=${pipeline} body=${body} words=${words} label="Replay" of=${`the letters with ${group.error}`} small /> <${Purge} pipeline=${pipeline} body=${body} words=${words} label="Purge" of=${`the letters with ${group.error}`} small /></td>
    </tr>
  `;
}

const are = ({ letters }) => (letters === 1 ? "is" : "are");

const Removed = ({ plan, one, of, place = plan.place }) => html`
  <p>${plan.letters ? html`<strong>${plural(plan.letters, one)}</strong>${of} ${are(plan)} removed from ${place}. This cannot be undone: what is removed is lost, unless something else has it.` : "There is nothing to remove."}</p>
`;

const held = (plan, one = "letter") => Object.entries(plan.held).map(([why, number]) => html`<p key=${why} class="note">${plural(number, one)} left alone: ${why}.</p>`);

const Replay = ({ pipeline, words, body, ...more }) => html`
  <${Action} plan path=${`${api(pipeline)}/replay`} body=${body} command=${`weft dlq replay ${quoted(pipeline)} ${words}`} what=${(plan) => html`
    <p>${plan.letters ? html`<strong>${plural(plan.letters, "letter")}</strong> ${plan.letters === 1 ? "runs" : "run"} through ${pipeline} as it is now, into ${plan.targets.join(", ")}. Rows that a target refused go into that one alone.` : "There is nothing to replay."}</p>
    <p>What succeeds is removed from ${plan.place}; what fails again is a dead letter again. An old row may overwrite a newer one of the same key.</p>
    ${held(plan)}
  `} ...${more} />
`;

// Those that come after they were counted are not removed.
const Purge = ({ pipeline, words, body, ...more }) => html`
  <${Action} plan path=${`${api(pipeline)}/purge`} body=${body} decided=${(plan) => (body.ids ? body : { ...body, before: plan.at })} command=${`weft dlq purge ${quoted(pipeline)} ${words}`} what=${(plan) => html`<${Removed} plan=${plan} one="letter" />`} ...${more} />
`;

// Of a quarantine or the dead letters of a stream: all, or those of a group. Those that come after they were counted stay.
const eventsOf = (place, group, action) => {
  const body = group ? { group: group.group } : {};
  return {
    plan: true,
    small: true,
    path: `api/v1/streams/${encodeURIComponent(place)}/${action}`,
    body,
    decided: (plan) => ({ ...body, upto: plan.upto }),
    command: `weft streams ${action} ${quoted(place)}${group ? ` --group ${group.group}` : ""}`,
    of: group ? `the events with ${group.reason}` : place,
  };
};

export const ReplayPlace = ({ place, group, label = "Replay" }) => html`
  <${Action} ...${eventsOf(place, group, "replay")} label=${label} what=${(plan) => html`
    <p>${plan.letters ? html`<strong>${plural(plan.letters, "event")}</strong> of ${place} ${are(plan)} published to ${plan.of.join(", ")} again, at the end, once each. All consumers get them, also those that were done with them.` : "There is nothing to replay."}</p>
    <p>What is published is removed from ${place}; what still does not fit is put back. Events that are there already, or whose key another event has, are dropped.</p>
  `} />
`;

export const PurgePlace = ({ place, group, label = "Purge" }) => html`
  <${Action} ...${eventsOf(place, group, "purge")} label=${label} what=${(plan) => html`<${Removed} plan=${plan} one="event" of=${` of ${plan.of.join(", ")}`} place=${place} />`} />
`;

// Rows that targets of a pipeline put aside: all, or those of a group. More or fewer than were counted are left alone.
const rowsOf = (pipeline, group, action, body = group ? { group: group.group } : { all: true }) => ({
  plan: true,
  small: true,
  path: `api/v1/pipelines/${encodeURIComponent(pipeline)}/quarantine/${action}`,
  body,
  decided: (plan) => ({ ...body, rows: plan.letters }),
  command: `weft quarantine ${action} ${quoted(pipeline)} ${group ? `--group ${group.group}` : "--all"}`,
  of: `the rows ${group ? `with ${group.error}` : `of ${pipeline}`}`,
});

export const ReplayRows = ({ pipeline, group, label = "Replay" }) => html`
  <${Action} ...${rowsOf(pipeline, group, "replay")} label=${label} what=${(plan) => html`
    <p>${plan.letters ? html`<strong>${plural(plan.letters, "row")}</strong> ${are(plan)} loaded into ${plan.targets.join(", ")} once more, as ${pipeline} is now.` : "There is nothing to load."}</p>
    <p>What is loaded leaves ${plan.place} in the same transaction; what is rejected again stays in it. An old row may overwrite a newer one of the same key.</p>
    ${held(plan, "row")}
  `} />
`;

export const PurgeRows = ({ pipeline, group, label = "Purge" }) => html`
  <${Action} ...${rowsOf(pipeline, group, "purge")} label=${label} what=${(plan) => html`<${Removed} plan=${plan} one="row" />`} />
`;

export class Letter extends View {
  every = 15000;
  path = () => `${api(this.props.name)}/${encodeURIComponent(this.props.id)}`;

  show(letter) {
    const { pipeline, letter_id: id } = letter;
    const chosen = { pipeline, body: { ids: [id] }, words: `--id ${id.slice(0, 12)}` };
    return html`
      <${Title} kind="Dead letter" name=${id} about=${html`of <a href=${to("letters", pipeline)}>${pipeline}</a>`}>
        <${Replay} ...${chosen} label="Replay" primary /><${Purge} ...${chosen} label="Purge" />
      <//>
      <${ActionsOff} commands=${[`weft dlq replay ${quoted(pipeline)} --id ${id.slice(0, 12)}`]} />
      <${Panel} id="error" title="Why it failed"><pre class="code bad-text">${letter.error}</pre><//>
      <${Panel} id="stands" title="The row">
        <${Facts} facts=${[
          ["Failed", html`<${Time} at=${letter.failed_at} />`],
          ["Stage", letter.stage],
          ["Source", letter.source],
          ["Offset", letter.offset],
          ["Refused by", letter.target],
          ["Batch", letter.batch],
          ["Replays that failed", letter.replays || null],
        ]} />
        <${Code} label="Payload" text=${indented(letter.payload)} />
        <p class="foot top-gap">${letter.cut && html`<span class="note">The rest is cut off here.</span>`}<${Command} text=${`weft dlq show ${quoted(pipeline)} ${id.slice(0, 12)}`} /></p>
      <//>
    `;
  }
}
