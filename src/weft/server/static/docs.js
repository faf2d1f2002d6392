// Reads openapi.json and makes a form of every operation.

import { Refused, address, ask, askJson, indented, key } from "./api.js";
import { duration, find, make, say } from "./dom.js";
import { keyDialog } from "./key.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const SHOWN = 100_000; // characters of an answer
const NOT_TRIED = ["Content-Encoding"]; // a browser sends bodies as they are
let api;

const askForKey = keyDialog(load);

async function load() {
  try {
    api = await askJson("openapi.json");
  } catch (error) {
    find("banner").hidden = false;
    say(find("banner"), error instanceof Refused ? error.message : "The service does not answer. Load the page again.");
    if (error.status === 401) askForKey(error.message);
    return;
  }
  find("banner").hidden = true;
  say(find("version"), `Weft ${api.info.version}.`);
  const groups = api.tags.map((tag) => {
    const tagged = operations().filter(({ operation }) => operation.tags.includes(tag.name));
    const id = `tag-${tag.name}`;
    return make(
      "section",
      { class: "panel", "aria-labelledby": id },
      make("div", { class: "head" }, make("h2", { id }, tag.name[0].toUpperCase() + tag.name.slice(1)), make("p", { class: "note" }, tag.description)),
      ...tagged.map(operationBox),
    );
  });
  const names = Object.keys(api.components.schemas).filter((name) => name.startsWith("Event.")).map((name) => name.slice(6));
  find("operations").replaceChildren(make("datalist", { id: "names" }, ...names.map((name) => make("option", { value: name }))), ...groups);
  find("operations").setAttribute("aria-busy", "false");
}

function operations() {
  return Object.entries(api.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => ({
      path,
      method,
      operation: item[method],
      parameters: [...(item.parameters || []), ...(item[method].parameters || [])],
    })),
  );
}

function operationBox(each) {
  const { path, method, operation } = each;
  const box = make(
    "details",
    { class: "operation" },
    make("summary", {}, make("span", { class: `method ${method}` }, method.toUpperCase()), make("code", {}, ...path.split(/(?<=\/)/).flatMap((part) => [part, make("wbr")])), make("span", { class: "note" }, operation.summary)),
  );
  // Made when it is first opened: there may be hundreds of streams.
  box.addEventListener("toggle", () => box.open && box.children.length === 1 && box.append(operationForm(each)));
  return box;
}

function operationForm({ path, method, operation, parameters }) {
  const inputs = parameters
    .filter((parameter) => !NOT_TRIED.includes(parameter.name))
    .map((parameter) => [parameter, make("input", { autocomplete: "off", spellcheck: "false", required: parameter.required, list: parameter.in === "path" && parameter.name === "name" ? "names" : null })]);
  const content = operation.requestBody?.content["application/json"];
  const body = content && make("textarea", { rows: 6, spellcheck: "false" });
  if (body) body.value = JSON.stringify(example(content.schema), null, 2);
  const answer = make("div", { class: "answer", role: "status" });
  const command = make("pre", {});
  const stop = make("button", { type: "button", hidden: true }, "Stop");
  const request = () => build(path, method, inputs, body);
  const showCommand = () => say(command, curl(request()));
  const form = make(
    "form",
    { class: "try" },
    operation.description ? make("p", {}, operation.description) : null,
    ...inputs.map(([parameter, input]) =>
      make("label", { class: "field stacked" }, make("span", {}, make("code", {}, parameter.name), ` (${parameter.in}${parameter.required ? ", required" : ""}) `, parameter.description || parameter.schema.description || ""), input),
    ),
    body ? make("label", { class: "field stacked" }, "Body (application/json)", body) : null,
    make("div", { class: "actions start" }, make("button", { class: "primary" }, "Send"), stop),
    make("details", { class: "more" }, make("summary", {}, "As a command"), command),
    make("details", { class: "more" }, make("summary", {}, "What it may answer"), answers(operation)),
    answer,
  );
  form.addEventListener("input", showCommand);
  showCommand();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(request(), answer, stop);
  });
  return form;
}

function build(path, method, inputs, body) {
  let filled = path;
  const query = new URLSearchParams();
  const headers = {};
  for (const [parameter, input] of inputs) {
    const value = input.value;
    if (parameter.in === "path") filled = filled.replace(`{${parameter.name}}`, encodeURIComponent(value || parameter.name));
    else if (value && parameter.in === "query") query.append(parameter.name, value);
    else if (value) headers[parameter.name] = value;
  }
  if (body) headers["Content-Type"] = "application/json";
  const url = address(filled.replace(/^\//, "") + (query.size ? `?${query}` : ""));
  return { url, options: { method: method.toUpperCase(), headers, body: body?.value } };
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl({ url, options }) {
  const parts = ["curl -N"];
  if (options.method !== "GET") parts.push(`-X ${options.method}`);
  for (const [name, value] of Object.entries(options.headers)) parts.push(`-H ${quoted(`${name}: ${value}`)}`);
  if (key()) parts.push('-H "Authorization: Bearer $WEFT_KEY"');
  if (options.body) parts.push(`-d ${quoted(options.body)}`);
  return [...parts, quoted(url.href)].join(" \\\n  ");
}

async function send({ url, options }, place, stop) {
  const abort = new AbortController();
  stop.hidden = false;
  stop.onclick = () => abort.abort();
  const started = performance.now();
  const status = make("p", { class: "strong" }, "Sent …");
  const text = make("pre", { tabindex: "0", "aria-label": "The answer" });
  place.replaceChildren(status, text);
  try {
    const answer = await ask(url, { ...options, signal: abort.signal });
    say(status, `${answer.status} ${answer.statusText} after ${duration((performance.now() - started) / 1000)}`);
    status.className = `strong chip ${answer.ok ? "good" : "bad"}`;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let body = "";
    for (let part = await reader.read(); !part.done && body.length < SHOWN; part = await reader.read()) {
      body += part.value;
      text.textContent = body;
    }
    text.textContent = indented(body.slice(0, SHOWN)) || "(nothing)";
    await reader.cancel();
  } catch (error) {
    if (error.name === "AbortError") status.append(" (stopped)");
    else say(status, "The service does not answer.");
  }
  stop.hidden = true;
}

function answers(operation) {
  const rows = Object.entries(operation.responses).map(([status, response]) => {
    const kinds = Object.entries(response.content || {});
    const shape = kinds.map(([type, { schema }]) => `${type}${schema.$ref ? `: ${schema.$ref.split("/").at(-1)}` : ""}`).join(", ");
    return make("tr", {}, make("th", { scope: "row", class: "number" }, status), make("td", {}, response.description), make("td", {}, make("code", {}, shape)));
  });
  const heads = ["Status", "When", "Body"].map((text, index) => make("th", { scope: "col", class: index ? "" : "number" }, text));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
}

// A value that fits a schema, to begin with.
function example(schema, depth = 0) {
  if (schema.$ref) return example(api.components.schemas[schema.$ref.split("/").at(-1)], depth);
  if (schema.anyOf) return example(schema.anyOf[0], depth);
  if (schema.default !== undefined && schema.default !== null) return schema.default;
  if (schema.type === "object") {
    const wanted = depth ? [] : Object.keys(schema.properties || {}).filter((name) => !schema.required || schema.required.includes(name));
    return Object.fromEntries(wanted.map((name) => [name, example(schema.properties[name], depth + 1)]));
  }
  if (schema.type === "array") return schema.items.type === "object" || schema.items.$ref ? [{ _weft_rowid: 1 }] : [];
  if (schema.type === "integer") return 1;
  if (schema.type === "number") return 1.5;
  if (schema.type === "boolean") return true;
  if (schema.format === "date") return new Date().toISOString().slice(0, 10);
  if (schema.format === "date-time") return new Date().toISOString();
  if (schema.format === "uuid") return crypto.randomUUID?.() || "00000000-0000-4000-8000-000000000000";
  return schema.type === "string" ? "text" : null;
}

load();
