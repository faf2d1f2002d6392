// The line of the header that says whether the page is live, the banner, and requests that are repeated while somebody looks.

import { Refused, askJson, key } from "./api.js";
import { find, say } from "./dom.js";

const polls = new Set();
let askForKey = () => {};

export function banner(text = "") {
  find("banner").hidden = !text;
  say(find("banner"), text);
}

function live(text, why) {
  find("live").className = `live ${why ? "bad" : "ok"}`;
  say(find("live-text"), text);
  banner(why);
}

// Why each was refused the last time: one that succeeds says nothing of the others.
const refused = new Map();
function settled(poll, why) {
  if (why) refused.set(poll, why);
  else refused.delete(poll);
  live(refused.size ? "Refused" : "Live", [...refused.values()][0]);
}

// What the key of this tab may do. It is asked for after a request with that key succeeded: the service counts wrong ones.
let known = { key: null, may_act: false, why_not: null };
let learntWith; // the key of which it is known
const watchers = new Set();
export const me = () => known;

export function onMe(changed) {
  watchers.add(changed);
  return () => watchers.delete(changed);
}

export async function learn() {
  learntWith = key();
  try {
    become(await askJson("api/v1/me"));
  } catch (error) {
    const asked = learntWith;
    unlearn(error);
    if (error.status === 401) learntWith = asked; // not asked again with the same one
  }
}

export function unlearn(error) {
  learntWith = undefined;
  become({ key: null, may_act: false, why_not: error.message });
}

function become(answer) {
  known = answer;
  watchers.forEach((changed) => changed());
}

// What was done, and how it went: shown above every view until it is put away.
const notices = [];
let shown = () => {};
export const noticesShownBy = (show) => (shown = show);

export function noticed(notice) {
  const self = { ...notice, id: Symbol(notice.name), close: () => drop(self) };
  notices.push(self);
  if (notices.length > 3) notices.shift();
  shown(notices);
  return (changes) => shown(notices, Object.assign(self, changes));
}

function drop(notice) {
  notices.splice(notices.indexOf(notice), 1);
  shown(notices);
}

// What opens the dialog for a key.
export const keyAskedBy = (ask) => (askForKey = ask);
export const refreshAll = () => polls.forEach((each) => each.now());

// Asks for a path again and again, and shows each answer. `missing` is called where there is no such thing, or
// not for this key.
export function poll(path, show, { every = 2000, missing } = {}) {
  let timer;
  let asking = 0;
  const self = {
    async now() {
      clearTimeout(timer);
      const turn = ++asking;
      let pause = every;
      try {
        const answer = await askJson(typeof path === "function" ? path() : path);
        if (turn !== asking) return;
        show(answer);
        settled(self);
        if (key() !== learntWith) learn();
      } catch (error) {
        if (turn !== asking) return;
        if (error instanceof Refused && [403, 404, 409].includes(error.status) && missing) {
          settled(self);
          return missing(error);
        }
        if (error instanceof Refused) {
          settled(self, `${error.message} ${error.hint || ""}`);
          // Not asked again before there is another key: the service counts wrong ones.
          if (error.status === 401) {
            unlearn(error);
            return askForKey(error.message);
          }
          pause = Math.max(pause, (error.retryAfter || 0) * 1000);
        } else {
          live("Not connected", "The service does not answer. What is shown is from before; trying again …");
          learntWith = undefined; // it may be another service that answers next
          if (!(error instanceof TypeError)) console.error(error); // a fetch that fails is a TypeError
        }
      }
      // A page that nobody looks at asks for nothing.
      if (!document.hidden) timer = setTimeout(self.now, pause);
    },
    stop() {
      asking++;
      clearTimeout(timer);
      polls.delete(self);
      refused.delete(self);
    },
    pause: () => clearTimeout(timer),
  };
  polls.add(self);
  self.now();
  return self;
}

document.addEventListener("visibilitychange", () => polls.forEach((each) => (document.hidden ? each.pause() : each.now())));
