// Elements and texts. Whatever comes from outside becomes a text node: nothing here parses HTML.

export const find = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "g", "rect"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

// Only where it changes: a screen reader would read it again, and a selection would be lost.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const oneDecimal = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });

export const count = (value) => (value == null ? "–" : whole.format(value));
export const rate = (value) => (value == null ? "–" : (value < 100 ? oneDecimal : whole).format(value));

// As short as an axis wants it: 1.2K, 3.4M.
const short = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
export const compact = (value) => (value == null ? "–" : short.format(value));

// As disks are sold, in one unit: 3.4 MB.
export function bytes(value) {
  const [size, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"]].find(([each]) => value >= each) ?? [1, "bytes"];
  return `${(value < 100 * size ? oneDecimal : whole).format(value / size)} ${unit}`;
}

// The same of seconds, in one unit.
export function briefDuration(seconds) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([each]) => seconds >= each) ?? [0.001, "ms"];
  return seconds ? `${oneDecimal.format(seconds / size)} ${unit}` : "0";
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 60) return `${oneDecimal.format(seconds)} s`;
  const rounded = Math.round(seconds); // before it is taken apart: 119.7 s are no 1 min 60 s
  const two = (value, size, unit, rest) => `${Math.floor(value / size)} ${unit}${value % size ? ` ${value % size} ${rest}` : ""}`;
  if (rounded < 3600) return two(rounded, 60, "min", "s");
  const minutes = Math.round(rounded / 60);
  if (minutes < 1440) return two(minutes, 60, "h", "min");
  return `${Math.round(seconds / 86400)} d`;
}

export const utc = (at) => new Date(at).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC");

export function ago(moment, now) {
  const seconds = Math.max(0, (now - new Date(moment)) / 1000);
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

export const plural = (number, one, many = one + "s") => `${count(number)} ${number === 1 ? one : many}`;
