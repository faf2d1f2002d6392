// Requests to the service, with the key of this tab.

const STORED = "weft.key";
const base = new URL(".", location.href);

export const key = () => sessionStorage.getItem(STORED);
export const keepKey = (value) => (value ? sessionStorage.setItem(STORED, value) : sessionStorage.removeItem(STORED));
export const address = (path) => new URL(path, base);

export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || `The service answered ${status}.`);
    this.status = status;
    this.hint = problem.hint;
    this.retryAfter = problem.retry_after;
  }
}

// JSON with all digits of its whole numbers: those beyond 2^53 stay as they are written, for JSON.stringify. Only texts with so many digits need the slow way.
export const parseJson = (text) => (/\d{16}/.test(text) ? JSON.parse(text, exact) : JSON.parse(text));

const exact = (_, value, context) =>
  typeof value === "number" && JSON.rawJSON && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source) ? JSON.rawJSON(context.source) : value;

// JSON with line breaks, each value as it was written: a number of JavaScript would lose digits. Another text is left alone.
export function indented(text) {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let depth = 0;
  const line = (change) => `\n${"  ".repeat((depth += change))}`;
  return text.replace(/"(?:[^"\\]|\\.)*"|[{[]\s*[}\]]|[{}[\],:]|\s+/g, (token) => {
    if (/^["]/.test(token)) return token;
    const sign = token.replace(/\s/g, "");
    if (sign === "{" || sign === "[") return sign + line(1);
    if (sign === "}" || sign === "]") return line(-1) + sign;
    if (sign === ",") return sign + line(0);
    return sign === ":" ? ": " : sign;
  });
}

export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key() && !headers.has("authorization")) headers.set("authorization", `Bearer ${key()}`);
  return fetch(address(path), { ...options, headers, cache: "no-store", credentials: "omit" });
}

export const post = (path, body) =>
  askJson(path, body === undefined ? { method: "POST" } : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

export async function askJson(path, options) {
  const answer = await ask(path, options);
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body);
  return body;
}
