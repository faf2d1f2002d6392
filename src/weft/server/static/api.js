// Requests to the service, with the key of this tab.

import { find, say } from "./dom.js";

const STORED = "weft.key";
const base = new URL(".", location.href);

export const key = () => sessionStorage.getItem(STORED);
export const address = (path) => new URL(path, base);

export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || `The service answered ${status}.`);
    this.status = status;
    this.retryAfter = problem.retry_after;
  }
}

export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key() && !headers.has("authorization")) headers.set("authorization", `Bearer ${key()}`);
  return fetch(address(path), { ...options, headers, cache: "no-store", credentials: "omit" });
}

export async function askJson(path, options) {
  const answer = await ask(path, options);
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body);
  return body;
}

// The dialog that asks for a key. `changed` is called when there is another one.
export function keyDialog(changed) {
  const dialog = find("key-dialog");
  const input = find("key-input");
  const open = (text) => {
    if (dialog.open) return;
    say(find("key-text"), text);
    input.value = "";
    find("key-forget").hidden = !key();
    dialog.returnValue = "";
    dialog.showModal();
    input.focus();
  };
  find("key-button").addEventListener("click", () => open(key() ? "A key is in use in this tab." : "No key is in use."));
  find("key-form").addEventListener("keydown", (event) => {
    // Enter would press the first button, which forgets.
    if (event.key === "Enter" && event.target === input) {
      event.preventDefault();
      dialog.close("use");
    }
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "forget") sessionStorage.removeItem(STORED);
    else if (dialog.returnValue === "use" && input.value.trim()) sessionStorage.setItem(STORED, input.value.trim());
    else return;
    input.value = "";
    changed();
  });
  return open;
}
