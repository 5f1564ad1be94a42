// The x axis that all curves of a page share: rounds, time by the clock, or time since the start of a run. The address keeps
// what is chosen, so that a link shows the same.

import { byId, duration, moment, number, say, showIf } from "./dom.js";

/** `from`, `to`: the range that is shown, in rounds or seconds; null: the whole run. */
export const axis = { kinds: ["round"], kind: "round", from: null, to: null };
const MOST = 1e12, LEAST_SPAN = 2;
const watchers = [];

/** Take up what the address says, and tell the curves. `kinds`: what this page can show, the usual one first; `ends()`: the first
 * and the last round or time that there is; `same(kind)`: the range shown, on another axis. */
export function follow(kinds, onChange, ends, same = () => null) {
  axis.kinds = kinds;
  watchers.push(onChange);
  for (const box of choices()) box.addEventListener("change", () => choose({ kind: box.value, range: axis.from === null ? null : same(box.value) }));
  byId("zoom-in").addEventListener("click", () => scale(0.5, ends()));
  byId("zoom-out").addEventListener("click", () => scale(2, ends()));
  byId("earlier").addEventListener("click", () => shift(-0.5, ends()));
  byId("later").addEventListener("click", () => shift(0.5, ends()));
  byId("whole").addEventListener("click", () => choose({ range: null }));
  addEventListener("popstate", read);
  read();
}

/** Show so many times the range, around `at` or its middle; all of the run where that is no more. */
export function scale(times, [first, last], at = null) {
  const [from, to] = axis.from === null ? [first, last] : [axis.from, axis.to];
  const middle = at ?? (from + to) / 2, half = (times * (to - from)) / 2;
  if (2 * half >= last - first) choose({ range: null });
  else choose({ range: within([middle - half, middle + half], first, last) });
}

/** Show what comes before or after, by a part of the range. */
export function shift(part, [first, last]) {
  if (axis.from === null) return;
  const by = part * (axis.to - axis.from);
  choose({ range: within([axis.from + by, axis.to + by], first, last) });
}

function within([from, to], first, last) {
  const back = Math.max(0, to - Math.ceil(last)), on = Math.max(0, Math.floor(first) - from);
  return [from - back + on, to - back + on];
}

const choices = () => byId("axis").querySelectorAll("input");

function read() {
  const kind = new URLSearchParams(location.search).get("x");
  axis.kind = axis.kinds.includes(kind) ? kind : axis.kinds[0];
  const [from, to] = ["from", "to"].map((name) => Number.parseFloat(new URLSearchParams(location.search).get(name)));
  [axis.from, axis.to] = from >= 0 && to <= MOST && to - from >= LEAST_SPAN ? [from, to] : [null, null];
  for (const id of ["zoom-out", "earlier", "later", "whole"]) showIf(byId(id), axis.from !== null);
  say(byId("range"), axis.from === null ? "" : `${words(axis.from)} – ${words(axis.to)}`);
  for (const box of choices()) box.checked = box.value === axis.kind;
  for (const tell of watchers) tell();
}

/** Show this, and let the address say so. What is usual is left out of it. */
export function choose({ kind = axis.kind, range = axis.from === null ? null : [axis.from, axis.to] }) {
  const asked = new URLSearchParams(location.search);
  const put = (name, value) => (value === null ? asked.delete(name) : asked.set(name, value));
  put("x", kind === axis.kinds[0] ? null : kind);
  const [from, to] = range === null ? [null, null] : [Math.max(0, Math.floor(range[0])), Math.min(MOST, Math.ceil(range[1]))];
  const spare = range === null ? 0 : Math.max(0, LEAST_SPAN - (to - from));
  put("from", from);
  put("to", to === null ? null : to + spare);
  const query = asked.toString();
  history.pushState(null, "", `${location.pathname}${query && `?${query}`}${location.hash}`);
  read();
}

/** Where the points of a chart lie on the axis; null for one whose time is not known. */
export function places({ start, width = 1, time_s: times = [] }) {
  return axis.kind === "round" ? start.map((round) => round + (width - 1) / 2) : times;
}

const words = (at) => (axis.kind === "round" ? `round ${number(at)}` : axis.kind === "start" ? duration(at) : moment(at));

// ---- marks of time -------------------------------------------------------------------------------------------------

const DAY = 86400;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, DAY, 2 * DAY];

function stepOf(span, count) {
  const known = STEPS.find((step) => span / step <= count);
  if (known) return known;
  const unit = 10 ** Math.floor(Math.log10(span / count / DAY));
  return DAY * unit * [1, 2, 5, 10].find((factor) => span / (factor * unit * DAY) <= count);
}

const local = (seconds, options) => new Date(seconds * 1000).toLocaleString("en-GB", options);
const day = (seconds) => local(seconds, { day: "numeric", month: "short" });
const offsetOf = (seconds) => 60 * new Date(seconds * 1000).getTimezoneOffset();

/** [[seconds, text]…], at most `count` and one: full hours or days of the reader's clock, or round durations since the start. */
export function timeMarks(first, last, count) {
  const step = stepOf(Math.max(1, last - first), count), offset = axis.kind === "time" ? offsetOf(first) : 0;
  const found = [];
  for (let at = Math.ceil((first - offset) / step) * step + offset; at <= last; at += step) found.push(at);
  if (axis.kind === "start") return found.map((at) => [at, since(at, step)]);
  const isMidnight = (at) => (at - offset) % DAY === 0;
  const isDated = found.some(isMidnight);
  const clock = { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) };
  return found.map((at, place) => [at, isMidnight(at) ? day(at) : `${place || isDated ? "" : `${day(at)} `}${local(at, clock)}`]);
}

function since(seconds, step) {
  const [size, unit] = step >= DAY ? [DAY, "d"] : step >= 1800 ? [3600, "h"] : step >= 60 ? [60, "min"] : [1, "s"];
  return `${number(seconds / size, Number.isInteger(step / size) ? 0 : 1)} ${unit}`;
}

/** The places before which nothing happened for a while: the node stood still or was off. There a curve is broken. */
export function gapsIn(xs, span) {
  if (axis.kind === "round" || xs.length < 3) return new Set();
  const steps = xs.slice(1).map((x, place) => x - xs[place]), usual = [...steps].sort((a, b) => a - b)[Math.floor((steps.length - 1) / 2)];
  return new Set(steps.flatMap((step, place) => (step > 5 * usual && step > span / 50 ? [place + 1] : [])));
}
