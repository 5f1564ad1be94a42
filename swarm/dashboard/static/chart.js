// A curve over rounds as SVG: the mean as a line, least to greatest as a shade. Read with a pointer or the arrow keys.

import { make, moment, number, say, short, svg } from "./dom.js";

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

const inspected = new Set();

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
    this.plot.append(this.grid, this.shade, this.raw, this.lines, this.cross);
    this.now = make("span", { class: "now" }, "–");
    this.legend = make("ul", { class: "legend", hidden: "" });
    this.pad = make("div", {
      class: "pad", tabindex: "0", role: "slider", "aria-label": `${title}: round to read`,
      "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", "aria-valuetext": "no rounds yet",
      onpointermove: (event) => this.pointAt(event), onpointerleave: () => this.inspect(null),
      onkeydown: (event) => this.key(event), onblur: () => this.inspect(null), onfocus: () => this.inspect(this.at ?? this.count() - 1),
    }, this.plot);
    this.figure = make("figure", { class: "card chart" },
      make("figcaption", {}, make("h3", {}, title), this.now), this.pad, this.legend);
    place.append(this.figure);
    this.isMany = lines;
    inspected.add(this);
    new ResizeObserver(() => this.resize()).observe(this.pad);
  }

  count() {
    return this.points ? this.points.start.length : 0;
  }

  /** `points`: {start, width, mean, min, max}, or with several lines {start, width, curves: [{name, values}]}; `isRaw`: few points,
   * which are not smoothed but marked. */
  show(points) {
    this.points = this.isSparse ? known(points) : points;
    this.draw();
  }

  resize() {
    const width = Math.round(this.pad.clientWidth);
    if (width === this.width) return;
    this.width = width;
    this.plot.setAttribute("width", width);
    this.draw();
  }

  scales() {
    const { start, width, min, max, mean, curves } = this.points;
    const known = (curves ? curves.flatMap((curve) => curve.values) : [...min, ...max, ...mean]).filter((v) => v !== null);
    let low = known.length ? known.reduce((a, b) => Math.min(a, b)) : 0;
    let high = known.length ? known.reduce((a, b) => Math.max(a, b)) : 1;
    if (this.floor !== null) low = Math.min(low, this.floor);
    if (high - low < 1e-9) high = low + (Math.abs(low) || 1) * 0.1;
    high += (high - low) * 0.05;
    const first = start[0] ?? 0, last = Math.max(first + 1, (start[start.length - 1] ?? 0) + width - 1);
    const x = (round) => MARGIN.left + ((round - first) / (last - first)) * (this.width - MARGIN.left - MARGIN.right);
    const y = (value) => HEIGHT - MARGIN.bottom - ((value - low) / (high - low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    return { x, y, low, high, first, last };
  }

  draw() {
    if (!this.points || this.width < 60) return;
    if (!this.count()) {
      this.grid.replaceChildren(label("no rounds yet", this.width / 2, HEIGHT / 2, "middle"));
      return;
    }
    const scales = this.scales();
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
    for (const round of ticks(first, last, this.width > 420 ? 6 : 4)) {
      if (Number.isInteger(round)) marks.push(label(round < 10000 ? number(round) : short(round), x(round), HEIGHT - 5, "middle"));
    }
    this.grid.replaceChildren(...marks);
  }

  drawOne({ x, y }) {
    const { start, width, mean, min, max } = this.points;
    const middle = start.map((round) => x(round + (width - 1) / 2));
    const window = Math.min(21, Math.max(1, Math.round(start.length / 16)));
    this.shade.setAttribute("d", width > 1 ? band(middle, min.map(orNull(y)), max.map(orNull(y))) : "");
    this.raw.setAttribute("d", window > 1 ? path(middle, mean.map(orNull(y))) : "");
    const line = this.lines.firstChild || this.lines.appendChild(svg("path", { class: "line" }));
    line.setAttribute("d", path(middle, smooth(mean, window).map(orNull(y))));
  }

  drawCurves({ x, y }) {
    const { start, curves } = this.points;
    while (this.lines.children.length > curves.length) this.lines.lastChild.remove();
    curves.forEach((curve, place) => {
      const line = this.lines.children[place] || this.lines.appendChild(svg("path"));
      line.setAttribute("class", `line hue-${place % 8} dash-${Math.floor(place / 8) % 4}`);
      const isFew = this.points.isRaw && start.length < 40;
      const shown = this.points.isRaw ? curve.values : smooth(curve.values, Math.min(21, Math.max(1, Math.round(start.length / 16))));
      const places = [...start.keys()].filter((place) => typeof shown[place] === "number");  // rounds without one are passed over
      line.setAttribute("d", path(places.map((place) => x(start[place])), places.map((place) => orNull(y)(shown[place])), isFew));
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
    const { start, mean } = this.points;
    this.pad.setAttribute("aria-valuemax", String(Math.max(0, this.count() - 1)));
    if (this.isMany) {
      const last = this.points.curves.map((curve) => [curve.name, curve.values.findLast((value) => typeof value === "number")]);
      const told = last.map(([name, value]) => `${name} ${short(value)}${this.unit}`).join(", ");
      this.plot.setAttribute("aria-label", `${this.title}: ${told || "no values yet"}`);
      if (this.at === null) say(this.now, last.length === 1 ? `${short(last[0][1])}${this.unit}` : "");
      return;
    }
    const known = mean.filter((value) => value !== null);
    const text = known.length
      ? `from ${short(known[0])} to ${short(known[known.length - 1])}${this.unit} over rounds ${start[0]} to ${start[start.length - 1]}`
      : "no values yet";
    this.plot.setAttribute("aria-label", `${this.title}: ${text}`);
    if (this.at === null) say(this.now, known.length ? `${short(known[known.length - 1])}${this.unit}` : "–");
  }

  pointAt(event) {
    if (!this.count()) return;
    const { first, last } = this.scales();
    const part = (event.clientX - this.pad.getBoundingClientRect().left - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
    const round = first + Math.min(1, Math.max(0, part)) * (last - first);
    for (const chart of inspected) if (chart.count() && chart.width) chart.inspect(chart.placeOf(round));
  }

  /** The bucket that a round is in, or the nearest one. */
  placeOf(round) {
    const { start, width } = this.points, middle = (width - 1) / 2;
    let best = 0;
    start.forEach((first, place) => {
      if (Math.abs(first + middle - round) < Math.abs(start[best] + middle - round)) best = place;
    });
    return best;
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !this.count()) return;
    event.preventDefault();
    this.inspect(Math.min(this.count() - 1, Math.max(0, (this.at ?? this.count() - 1) + step)));
  }

  /** Tell the values at one place; null: back to the newest. */
  inspect(place) {
    if (place === null && this.at !== null) for (const chart of inspected) if (chart !== this && chart.at !== null) chart.leave();
    if (place === null || place < 0 || place >= this.count()) {
      this.leave();
      return;
    }
    this.at = place;
    const { start, width, time_s: times } = this.points;
    const when = times?.[place] ? `, ${moment(times[place])}` : "";
    const rounds = width > 1 ? `rounds ${number(start[place])}–${number(start[place] + width - 1)}` : `round ${number(start[place])}`;
    const { x, y } = this.scales();
    this.cross.setAttribute("visibility", "visible");
    const left = x(start[place] + (this.isMany ? 0 : (width - 1) / 2));
    this.crossLine.setAttribute("x1", left);
    this.crossLine.setAttribute("x2", left);
    const text = `${rounds}${when}: ${this.isMany ? this.valuesAt(place) : this.valueAt(place, left, y)}`;
    say(this.now, text);
    this.pad.setAttribute("aria-valuenow", String(place));
    this.pad.setAttribute("aria-valuetext", text);
  }

  valueAt(place, left, y) {
    const { width, mean, min, max } = this.points;
    const value = mean[place];
    this.crossDot.setAttribute("visibility", value === null ? "hidden" : "inherit");
    if (value === null) return "no value";
    this.crossDot.setAttribute("cx", left);
    this.crossDot.setAttribute("cy", y(value));
    const spread = width > 1 ? ` (${short(min[place])} to ${short(max[place])})` : "";
    return `${short(value)}${this.unit}${spread}`;
  }

  valuesAt(place) {
    this.crossDot.setAttribute("visibility", "hidden");
    const known = this.points.curves.map((curve) => [curve.name, curve.values[place]]).filter(([, value]) => typeof value === "number");
    if (!known.length) return "no value";
    if (known.length === 1 && this.points.curves.length === 1) return `${short(known[0][1])}${this.unit}`;
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

const orNull = (scale) => (value) => (value === null || value === undefined ? null : scale(value));

function label(text, x, y, anchor) {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

/** `isMarked`: with a small cross at each point. */
function path(xs, ys, isMarked = false) {
  let isOn = false;
  const parts = [];
  xs.forEach((x, place) => {
    if (ys[place] === null || ys[place] === undefined) isOn = false;
    else {
      parts.push(`${isOn ? "L" : "M"}${x.toFixed(1)} ${ys[place].toFixed(1)}`);
      if (isMarked) parts.push("m-3 0h6m-3 -3v6m0 -3");
      isOn = true;
    }
  });
  return parts.length === 1 ? `${parts[0]}h0.1` : parts.join("");
}

function band(xs, lows, highs) {
  const there = xs.map((x, place) => [x, lows[place], highs[place]]).filter(([, low]) => low !== null);
  if (there.length < 2) return "";
  const up = there.map(([x, , high]) => `${x.toFixed(1)} ${high.toFixed(1)}`);
  const back = there.reverse().map(([x, low]) => `${x.toFixed(1)} ${low.toFixed(1)}`);
  return `M${[...up, ...back].join("L")}Z`;
}
