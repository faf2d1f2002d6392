// The dialog that asks for a key, the same on every page.

import { keepKey, key } from "./api.js";
import { find, make, say } from "./dom.js";

// `changed` is called when there is another key.
export function keyDialog(changed) {
  const why = make("p", { id: "key-text" });
  const input = make("input", { id: "key-input", type: "password", autocomplete: "off", spellcheck: "false" });
  const forget = make("button", { value: "forget", class: "quiet" }, "Forget it");
  const form = make(
    "form",
    { method: "dialog" },
    make("h2", { id: "key-title" }, "Key"),
    why,
    make("label", { class: "field stacked" }, "Key of the service, or token of a stream ", input),
    make("p", { class: "note" }, "It is kept until this tab is closed. Make one on the server with ", make("code", {}, "weft apikey create --scope read"), ", or with ", make("code", {}, "--scope admin"), " for actions and the audit log."),
    make("div", { class: "actions" }, forget, make("button", { value: "cancel" }, "Cancel"), make("button", { value: "use", class: "primary" }, "Use it")),
  );
  const dialog = make("dialog", { id: "key-dialog", "aria-labelledby": "key-title" }, form);
  document.body.append(dialog);
  const open = (text) => {
    if (dialog.open) return;
    say(why, text);
    input.value = "";
    forget.hidden = !key();
    dialog.returnValue = "";
    dialog.showModal();
    input.focus();
  };
  find("key-button").addEventListener("click", () => open(key() ? "A key is in use in this tab." : "No key is in use."));
  form.addEventListener("keydown", (event) => {
    // Enter would press the first button, which forgets.
    if (event.key === "Enter" && event.target === input) {
      event.preventDefault();
      dialog.close("use");
    }
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "forget") keepKey(null);
    else if (dialog.returnValue === "use" && input.value.trim()) keepKey(input.value.trim());
    else return;
    input.value = "";
    changed();
  });
  return open;
}
