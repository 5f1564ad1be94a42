// Elements and words. Whatever text comes in, of peers too, becomes text nodes: nothing here or elsewhere parses markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`class`, `on…` handlers, others by name; null leaves one out) and children: nodes or texts. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function svg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Only where it differs, so that nothing is laid out, selected text lost or read aloud again for no change. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function showIf(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}

const NONE = "–";

export function number(value, digits = 0) {
  if (typeof value !== "number" || !Number.isFinite(value)) return NONE;
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** About three digits, whatever the size; a whole number as such. */
export function short(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 10000) return number(value);
  if (size >= 10000) return `${number(value / 1000, size < 100000 ? 1 : 0)}k`;
  return number(value, size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : size >= 0.01 ? 2 : 4);
}

export function bytes(value) {
  if (typeof value !== "number") return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  for (; value >= 1000 && place < units.length - 1; place++) value /= 1000;
  return `${number(value, place && value < 100 ? 1 : 0)} ${units[place]}`;
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return NONE;
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${number(seconds / 3600, 1)} h` : `${Math.round(seconds / 86400)} days`;
}

export const ago = (thenS, nowS) => (typeof thenS === "number" && thenS > 0 ? `${duration(nowS - thenS)} ago` : NONE);

/** Such as "24 Nov 06:10", in the reader's time. */
export const moment = (timeS) => new Date(timeS * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" }).replace(",", "");

/** Fills a <dl> with [term, value, note] triples; the same terms in the same order only change their values. */
export function fillFacts(list, facts) {
  while (list.children.length > facts.length) list.lastElementChild.remove();
  facts.forEach(([term, value, note = ""], place) => {
    let pair = list.children[place];
    if (!pair) {
      pair = make("div", {}, make("dt"), make("dd"));
      list.append(pair);
    }
    say(pair.firstElementChild, term);
    say(pair.children[1], String(value));
    if (note && !pair.children[2]) pair.append(make("dd", { class: "more" }));
    if (pair.children[2]) say(pair.children[2], note);
  });
}
