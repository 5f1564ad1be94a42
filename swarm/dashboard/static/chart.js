// A curve over rounds or time as SVG: the mean as a line, least to greatest as a shade. Read with a pointer or the arrow keys.

import { axis, choose, gapsIn, places, scale, shift, timeMarks } from "./axis.js";
import { duration, make, moment, number, say, short, svg } from "./dom.js";

const MARGIN = { left: 44, right: 12, top: 10, bottom: 22 };
const HEIGHT = 190;

/** Round numbers that cover [low, high], about `count` of them. */
export function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= raw * 0.7) || 10 * unit;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step || 0);
  return found;
}

/** Mean over `window` known values around each place. */
function smooth(values, window) {
  const half = Math.floor(window / 2);
  let sum = 0, count = 0;
  const add = (place, sign) => {
    const value = values[place];
    if (value === undefined || value === null) return;
    sum += sign * value;
    count += sign;
  };
  for (let i = 0; i < half; i++) add(i, 1);
  return values.map((value, place) => {
    add(place + half, 1);
    add(place - half - 1, -1);
    return value === null || count === 0 ? null : sum / count;
  });
}

const charts = new Set();
let isDue = false;

/** Draw all charts with the next frame, over one range: that of all their points. */
export function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    for (const chart of charts) chart.place();
    [range.first, range.last] = axis.from === null ? ends() : [axis.from, axis.to];
    for (const chart of charts) chart.draw();
  });
}

const range = { first: 0, last: 1 };
const FEWEST_PX = 6;

/** The first and the last round or time of all points. */
export function ends() {
  const found = [...charts].flatMap((chart) => chart.ends);
  const first = found.length ? found.reduce((a, b) => Math.min(a, b)) : 0;
  return [first, found.reduce((a, b) => Math.max(a, b), first + 1)];
}

export class Chart {
  /** `unit`: behind values, such as " tokens/s". `lines`: several named curves in place of one with its shade. */
  constructor(place, title, { unit = "", floor = null, lines = false, isSparse = false } = {}) {
    this.title = title;
    this.unit = unit;
    this.floor = floor;
    this.isSparse = isSparse;
    this.points = null;
    this.at = null;
    this.width = 0;
    this.plot = svg("svg", { role: "img", height: HEIGHT, class: "plot" });
    this.grid = svg("g", { class: "grid" });
    this.shade = svg("path", { class: "shade" });
    this.raw = svg("path", { class: "raw" });
    this.lines = svg("g", { class: "lines" });
    this.cross = svg("g", { class: "cross", visibility: "hidden" });
    this.crossLine = svg("line", { y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.crossDot = svg("circle", { r: 3.5 });
    this.cross.append(this.crossLine, this.crossDot);
    this.inner = svg("g");
    this.inner.append(this.shade, this.raw, this.lines, this.cross);
    this.clip = svg("rect", { y: 0, height: HEIGHT });
    const clip = svg("clipPath", { id: `clip-${charts.size}` });
    clip.append(this.clip);
    this.drawn = svg("rect", { class: "drawn", y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom, visibility: "hidden" });
    this.plot.append(clip, this.grid, this.inner, this.drawn);
    this.clipId = `url(#clip-${charts.size})`;
    this.from = null;
    this.ends = [];
    this.now = make("span", { class: "now" }, "–");
    this.legend = make("ul", { class: "legend", hidden: "" });
    this.pad = make("div", {
      class: "pad", tabindex: "0", role: "slider", "aria-label": `${title}: point to read`,
      "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", "aria-valuetext": "no rounds yet",
      onpointerdown: (event) => this.press(event), onpointerup: (event) => this.release(event), onpointercancel: () => this.release(null),
      ondblclick: () => choose({ range: null }), onpointermove: (event) => this.pointAt(event), onpointerleave: () => this.inspect(null),
      onkeydown: (event) => this.key(event), onblur: () => this.inspect(null), onfocus: () => this.inspect(this.at ?? this.count() - 1),
    }, this.plot);
    this.figure = make("figure", { class: "card chart" },
      make("figcaption", {}, make("h3", {}, title), this.now), this.pad, this.legend);
    place.append(this.figure);
    this.isMany = lines;
    this.shown = [];
    this.xs = [];
    charts.add(this);
    new ResizeObserver(() => this.resize()).observe(this.pad);
  }

  count() {
    return this.xs.length;
  }

  /** `points`: {start, width, time_s, mean, min, max}, or with several lines {start, width, time_s, curves: [{name, values}]}; of
   * runs side by side by time there is no `start`, and each point is the mean of a `part` of the time. `isRaw`: few points, which are not smoothed but marked. `reach`: as many points
   * around one that has no value may speak for it. */
  show(points) {
    this.points = this.isSparse ? known(points) : points;
    redraw();
  }

  /** Find where the points lie on the axis. Those that lie nowhere, or outside of the range and not beside it, are left out. */
  place() {
    this.shown = [];
    this.xs = [];
    this.ends = [];
    if (!this.points) return;
    const all = places(this.points), known = [...all.keys()].filter((place) => typeof all[place] === "number");
    if (!known.length) return;
    const { width = 1, part = 0 } = this.points, half = (axis.kind === "round" ? width - 1 : part) / 2;
    this.ends = this.points.ends || [all[known[0]] - half, all[known[known.length - 1]] + half];
    const first = known.findIndex((place) => axis.from === null || all[place] >= axis.from);
    const last = known.findLastIndex((place) => axis.from === null || all[place] <= axis.to);
    const isStill = axis.kind !== "round" && first > last && !this.points.isRaw;  // what is beside it is no sign of life within
    this.shown = first < 0 || last < 0 || isStill ? [] : known.slice(Math.max(0, first - 1), last + 2);
    this.xs = this.shown.map((place) => all[place]);
  }

  resize() {
    const width = Math.round(this.pad.clientWidth);
    if (width === this.width) return;
    this.width = width;
    this.plot.setAttribute("width", width);
    this.draw();
  }

  /** Of what lies on the axis. */
  of(values) {
    return this.shown.map((place) => values[place] ?? null);
  }

  scales() {
    const { min, max, mean, curves } = this.points;
    const known = (curves ? curves.flatMap((curve) => this.of(curve.values)) : [min, max, mean].flatMap((values) => this.of(values))).filter((v) => v !== null);
    let low = known.length ? known.reduce((a, b) => Math.min(a, b)) : 0;
    let high = known.length ? known.reduce((a, b) => Math.max(a, b)) : 1;
    if (this.floor !== null) low = Math.min(low, this.floor);
    if (high - low < 1e-9) high = low + (Math.abs(low) || 1) * 0.1;
    high += (high - low) * 0.05;
    const { first, last } = range;
    const x = (at) => MARGIN.left + ((at - first) / (last - first)) * (this.width - MARGIN.left - MARGIN.right);
    const y = (value) => HEIGHT - MARGIN.bottom - ((value - low) / (high - low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    return { x, y, low, high, first, last };
  }

  draw() {
    if (!this.points || this.width < 60) return;
    this.plot.classList.toggle("none", !this.count());
    if (!this.count()) {
      for (const path of [this.shade, this.raw, ...this.lines.children]) path.setAttribute("d", "");
      say(this.now, "–");
      const why = this.ends.length ? "nothing in this range" : this.points.start?.length ? "the times of these rounds are not known" : "no rounds yet";
      this.grid.replaceChildren(label(why, this.width / 2, HEIGHT / 2, "middle"));
      return;
    }
    const scales = this.scales();
    this.clip.setAttribute("x", MARGIN.left);
    this.clip.setAttribute("width", this.width - MARGIN.left - MARGIN.right);
    if (axis.from === null) this.inner.removeAttribute("clip-path");
    else this.inner.setAttribute("clip-path", this.clipId);
    this.drawGrid(scales);
    if (this.isMany) this.drawCurves(scales);
    else this.drawOne(scales);
    this.inspect(this.at === null ? null : Math.min(this.at, this.count() - 1));
    this.describe();
  }

  drawGrid({ x, y, low, high, first, last }) {
    const marks = [];
    const values = ticks(low, high, 4);
    for (const value of values) {
      marks.push(svg("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(value), y2: y(value) }));
      marks.push(label(onAxis(value, values), MARGIN.left - 6, y(value) + 4, "end"));
    }
    const count = this.width > 420 ? 6 : 4;
    const across = axis.kind === "round"
      ? ticks(first, last, count).filter(Number.isInteger).map((round) => [round, round < 10000 ? number(round) : short(round)])
      : timeMarks(first, last, count);
    for (const [at, text] of across) marks.push(label(text, x(at), HEIGHT - 5, "middle"));
    this.grid.replaceChildren(...marks);
  }

  drawOne({ x, y, first, last }) {
    const { width } = this.points, [mean, min, max] = ["mean", "min", "max"].map((kind) => this.of(this.points[kind]));
    const xs = this.xs.map(x), gaps = gapsIn(this.xs, last - first);
    const window = windowOf(xs);
    this.shade.setAttribute("d", width > 1 ? band(xs, min.map(orNull(y)), max.map(orNull(y)), gaps) : "");
    this.raw.setAttribute("d", window > 1 ? path(xs, mean.map(orNull(y)), gaps) : "");
    const line = this.lines.firstChild || this.lines.appendChild(svg("path", { class: "line" }));
    line.setAttribute("d", path(xs, smooth(mean, window).map(orNull(y)), gaps));
  }

  drawCurves({ x, y, first, last }) {
    const { curves, isRaw } = this.points;
    while (this.lines.children.length > curves.length) this.lines.lastChild.remove();
    curves.forEach((curve, number) => {
      const line = this.lines.children[number] || this.lines.appendChild(svg("path"));
      line.setAttribute("class", `line hue-${number % 8} dash-${Math.floor(number / 8) % 4}`);
      const values = this.of(curve.values), shown = isRaw ? values : smooth(values, windowOf(values));
      const there = [...shown.keys()].filter((place) => shown[place] !== null);  // what has no value is passed over
      const gaps = gapsIn(there.map((place) => this.xs[place]), last - first), isFew = isRaw && there.length < 40;
      line.setAttribute("d", path(there.map((place) => x(this.xs[place])), there.map((place) => y(shown[place])), gaps, isFew));
    });
    this.legend.hidden = curves.length < 2 || curves.length > 16;
    if (this.legend.hidden) return;
    while (this.legend.children.length > curves.length) this.legend.lastChild.remove();
    curves.forEach((curve, place) => {
      const item = this.legend.children[place] || this.legend.appendChild(make("li", {}, make("i"), make("span")));
      item.className = `hue-${place % 8} dash-${Math.floor(place / 8) % 4}`;
      say(item.lastChild, curve.name);
    });
  }

  describe() {
    const { mean } = this.points;
    this.pad.setAttribute("aria-valuemax", String(Math.max(0, this.count() - 1)));
    if (this.isMany) {
      const last = this.points.curves.map((curve) => [curve.name, this.of(curve.values).findLast((value) => value !== null)]);
      const told = last.map(([name, value]) => `${name} ${short(value)}${this.unit}`).join(", ");
      this.plot.setAttribute("aria-label", `${this.title}: ${told || "no values yet"}`);
      if (this.at === null) say(this.now, last.length === 1 ? `${short(last[0][1])}${this.unit}` : "");
      return;
    }
    const known = this.of(mean).filter((value) => value !== null);
    const text = known.length
      ? `from ${short(known[0])} to ${short(known[known.length - 1])}${this.unit} over ${this.wordsOf(0)} to ${this.wordsOf(this.count() - 1)}`
      : "no values yet";
    this.plot.setAttribute("aria-label", `${this.title}: ${text}`);
    if (this.at === null) say(this.now, known.length ? `${short(known[known.length - 1])}${this.unit}` : "–");
  }

  /** Where a pointer is: the round or the time, and how far right in the plot. */
  under(event) {
    const across = this.width - MARGIN.left - MARGIN.right;
    const right = Math.min(across, Math.max(0, event.clientX - this.pad.getBoundingClientRect().left - MARGIN.left));
    return { at: range.first + (right / across) * (range.last - range.first), right };
  }

  /** A mouse or a pen may draw over the range to show. A finger reads values; there are buttons for it. */
  press(event) {
    if (event.button !== 0 || event.pointerType === "touch" || !this.count()) return;
    this.from = this.under(event);
    this.pad.setPointerCapture(event.pointerId);
  }

  release(event) {
    const { from } = this, to = event && this.under(event);
    this.from = null;
    this.drawn.setAttribute("visibility", "hidden");
    if (from && to && Math.abs(to.right - from.right) >= FEWEST_PX) choose({ range: [Math.min(from.at, to.at), Math.max(from.at, to.at)] });
  }

  pointAt(event) {
    if (!this.count()) return;
    const { at, right } = this.under(event);
    if (this.from) {
      this.drawn.setAttribute("visibility", "visible");
      this.drawn.setAttribute("x", MARGIN.left + Math.min(right, this.from.right));
      this.drawn.setAttribute("width", Math.abs(right - this.from.right));
    }
    for (const chart of charts) if (chart.count() && chart.width) chart.inspect(chart.nearest(at));
  }

  /** The place of the point that is nearest to a round or a time. */
  nearest(at) {
    return this.xs.reduce((best, x, place) => (Math.abs(x - at) < Math.abs(this.xs[best] - at) ? place : best), 0);
  }

  key(event) {
    const zoom = { "+": 0.5, "=": 0.5, "-": 2 }[event.key], pan = event.shiftKey && { ArrowLeft: -0.5, ArrowRight: 0.5 }[event.key];
    if (zoom) scale(zoom, ends(), this.xs[this.at] ?? null);
    else if (pan) shift(pan, ends());
    else if (event.key === "Escape" && axis.from !== null) choose({ range: null });
    else this.move(event);
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !this.count()) return;
    event.preventDefault();
    this.inspect(Math.min(this.count() - 1, Math.max(0, (this.at ?? this.count() - 1) + step)));
  }

  /** Tell the values at one place; null: back to the newest. */
  inspect(place) {
    if (place === null && this.at !== null) for (const chart of charts) if (chart !== this && chart.at !== null) chart.leave();
    if (place === null || place < 0 || place >= this.count()) {
      this.leave();
      return;
    }
    this.at = place;
    const { x, y } = this.scales(), left = x(this.xs[place]);
    this.cross.setAttribute("visibility", "visible");
    this.crossLine.setAttribute("x1", left);
    this.crossLine.setAttribute("x2", left);
    const text = `${this.wordsOf(place)}: ${this.isMany ? this.valuesAt(place) : this.valueAt(place, left, y)}`;
    say(this.now, text);
    this.pad.setAttribute("aria-valuenow", String(place));
    this.pad.setAttribute("aria-valuetext", text);
  }

  /** Which rounds and what time a place stands for. */
  wordsOf(place) {
    const { start, width = 1, time_s: times = [] } = this.points, at = this.shown[place];
    if (!start) return axis.kind === "start" ? `${duration(times[at])} after the start` : moment(times[at]);
    const rounds = width > 1 ? `rounds ${number(start[at])}–${number(start[at] + width - 1)}` : `round ${number(start[at])}`;
    return typeof times[at] === "number" ? `${rounds}, ${moment(times[at])}` : rounds;
  }

  valueAt(place, left, y) {
    const [value, least, most] = ["mean", "min", "max"].map((kind) => this.of(this.points[kind])[place]);
    this.crossDot.setAttribute("visibility", value === null ? "hidden" : "inherit");
    if (value === null) return "no value";
    this.crossDot.setAttribute("cx", left);
    this.crossDot.setAttribute("cy", y(value));
    const spread = this.points.width > 1 ? ` (${short(least)} to ${short(most)})` : "";
    return `${short(value)}${this.unit}${spread}`;
  }

  valuesAt(place) {
    this.crossDot.setAttribute("visibility", "hidden");
    const { curves, reach = 0 } = this.points, around = [0];
    for (let far = 1; far <= reach; far++) around.push(-far, far);
    const near = (values) => around.map((far) => values[place + far]).find((value) => typeof value === "number");
    const known = curves.map((curve) => [curve.name, near(this.of(curve.values))]).filter(([, value]) => value !== undefined);
    if (!known.length) return "no value";
    if (known.length === 1 && curves.length === 1) return `${short(known[0][1])}${this.unit}`;
    if (known.length <= 4) return known.map(([name, value]) => `${name} ${short(value)}`).join(", ");
    const values = known.map(([, value]) => value), mean = values.reduce((a, b) => a + b) / values.length;
    return `mean ${short(mean)} of ${values.length}, ${short(Math.min(...values))} to ${short(Math.max(...values))}`;
  }

  leave() {
    this.at = null;
    this.cross.setAttribute("visibility", "hidden");
    if (!this.points) return;
    this.describe();
  }
}

/** The buckets that have a value. */
function known({ start, time_s: times, width, mean, min, max }) {
  const places = [...mean.keys()].filter((place) => typeof mean[place] === "number");
  const of = (values) => places.map((place) => values[place]);
  return { start: of(start), time_s: of(times || []), width, mean: of(mean), min: of(min), max: of(max) };
}

/** All marks of an axis have the same number of decimals. */
function onAxis(value, values) {
  const step = values.length > 1 ? values[1] - values[0] : Math.abs(value) || 1;
  return Math.abs(value) >= 10000 ? short(value) : number(value, step >= 1 ? 0 : Math.min(4, Math.ceil(-Math.log10(step) - 1e-9)));
}

/** Over how many places a line of so many points is smoothed. */
const windowOf = (values) => Math.min(21, Math.max(1, Math.round(values.length / 16)));

const orNull = (scale) => (value) => (value === null || value === undefined ? null : scale(value));

function label(text, x, y, anchor) {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

/** `gaps`: places where the line begins anew; `isMarked`: with a small cross at each point. */
function path(xs, ys, gaps, isMarked = false) {
  return pieces(xs, ys, gaps).map((piece) => {
    const points = piece.map((place) => `${xs[place].toFixed(1)} ${ys[place].toFixed(1)}`);
    return isMarked ? `M${points.join("m-3 0h6m-3 -3v6m0 -3L")}m-3 0h6m-3 -3v6m0 -3` : `M${points.join("L")}${points.length > 1 ? "" : "h0.1"}`;
  }).join("");
}

/** Runs of places that have a value and no gap between them. */
function pieces(xs, ys, gaps) {
  const found = [[]];
  xs.forEach((x, place) => {
    if ((gaps.has(place) || ys[place] === null) && found[found.length - 1].length) found.push([]);
    if (ys[place] !== null) found[found.length - 1].push(place);
  });
  return found.filter((piece) => piece.length);
}

function band(xs, lows, highs, gaps) {
  return pieces(xs, lows, gaps).filter((piece) => piece.length > 1).map((piece) => {
    const edge = (ys) => piece.map((place) => `${xs[place].toFixed(1)} ${ys[place].toFixed(1)}`);
    return `M${[...edge(highs), ...edge(lows).reverse()].join("L")}Z`;
  }).join("");
}
