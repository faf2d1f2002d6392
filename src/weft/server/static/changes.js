// What became different within a day: runs by the run log, and for those who may see it what people did.

import { Of } from "./audit.js";
import { plural } from "./dom.js";
import { Chip, NameLink, Panel, Time, html, to } from "./ui.js";

const KINDS = { "began to fail": "bad", recovered: "good", cancelled: "warn", paused: "warn", started: "busy" };
// What is in the audit log too, where somebody did it over HTTP.
const DONE_AS = { cancelled: "cancel", paused: "pause" };
const DAY_MS = 86400_000;
const MOST = 5;
const MOST_OPENED = 100;

const times = (failures) => (failures === 1 ? "once" : plural(failures, "time"));

function Change({ at, what, name, note, run_id: run, failures, now }) {
  const place = what === "started" ? to("processes") : run ? to("runs", run) : to("pipelines", name);
  const when = html`<${Time} relative at=${at} now=${now} />`;
  const why = note && `: ${note}`;
  return html`
    <li>
      <${NameLink} href=${place} name=${name} /> <${Chip} kind=${KINDS[what]}>${what}<//>
      <span class="note block cut">${what === "recovered" ? html`failed ${times(failures)}, last ${when}${why}` : html`${when}${failures > 1 ? `, failed ${times(failures)}` : ""}${why}`}</span>
    </li>
  `;
}

const Done = ({ at, action, object, key_name: who, key_id: id, outcome, now }) => html`
  <li><${Of} kind="strong" action=${action} object=${object} /> <${Chip}>${action}<//><span class="note block cut"><${Time} relative at=${at} now=${now} />, by ${who || id}${outcome && `: ${outcome}`}</span></li>
`;

export function Changes({ changes, actions, now }) {
  const did = new Set(actions.map((each) => `${each.action} ${each.object}`));
  const all = [
    ...changes.filter((each) => !did.has(`${DONE_AS[each.what]} ${each.run_id ?? each.name}`)),
    ...actions.filter((each) => now - new Date(each.at) < DAY_MS),
  ].sort((a, b) => new Date(b.at) - new Date(a.at));
  const list = (some) => html`<ul class="list">${some.map((each) => html`<${each.action ? Done : Change} key=${`${each.at} ${each.name ?? each.id} ${each.what}`} ...${each} now=${now} />`)}</ul>`;
  return html`
    <${Panel} id="changes-title" title="Changed within a day" note=${all.length || null}>
      ${all.length ? list(all.slice(0, MOST)) : html`<p class="foot note">No pipeline began to fail or recovered; none was cancelled or paused, and no process started.</p>`}
      ${all.length > MOST && html`<details class="rest"><summary class="note">and ${all.length - MOST} more</summary>${list(all.slice(MOST, MOST_OPENED))}</details>`}
    <//>
  `;
}
