// A map of nodes on a circle, with an arrow from each to those it gave something; the wider, the more. A table has the same numbers.

import { make, number, say, svg } from "./dom.js";

const HEIGHT = 340, LOW = 190, NODE = 7, MOST_WIDTH = 6, MOST_LABEL = 16;

export class SwarmMap {
  constructor(place, title) {
    this.title = title;
    this.told = null;
    this.width = 0;
    this.height = LOW;
    this.plot = svg("svg", { role: "img", height: LOW, class: "plot" });
    this.says = make("p", { class: "note" });
    this.pad = make("div", { class: "pad" }, this.plot);
    place.append(make("h3", {}, title), this.pad, this.says);
    new ResizeObserver(() => this.resize()).observe(this.pad);
  }

  /** `nodes`: {id, name, isCentre?}; `edges`: {from, to, weight, unit}, of which those without weight are left out. */
  show(nodes, edges, note = "") {
    this.told = { nodes, edges: edges.filter((edge) => edge.weight > 0) };
    say(this.says, !this.told.edges.length ? "Nothing was exchanged yet." : `An arrow points to who received; its width is how much. ${note ? `Shown: ${note}.` : ""}`);
    this.draw();
  }

  resize() {
    const width = Math.round(this.pad.clientWidth);
    if (width === this.width) return;
    this.width = width;
    this.plot.setAttribute("width", width);
    this.draw();
  }

  draw() {
    if (!this.told || this.width < 60) return;
    const { nodes, edges } = this.told;
    this.height = nodes.length < 4 ? LOW : HEIGHT;
    this.plot.setAttribute("height", this.height);
    const places = this.places(nodes);
    const most = edges.reduce((a, edge) => Math.max(a, edge.weight), 1);
    const lines = edges.filter((edge) => places.has(edge.from) && places.has(edge.to)).map((edge) => this.arrow(edge, places, most, nodes));
    const dots = nodes.map((node) => this.dot(node, places.get(node.id)));
    this.plot.replaceChildren(...lines, ...dots);
    this.plot.setAttribute("aria-label", `${this.title}: ${nodes.length} nodes, ${edges.length} arrows; the table beside it has the numbers`);
  }

  places(nodes) {
    const around = nodes.filter((node) => !node.isCentre), isPair = nodes.length === 2;
    const across = Math.max(40, Math.min(this.width / 2 - 74, isPair ? 120 : 230)), down = this.height / 2 - 34;
    const centre = [this.width / 2, this.height / 2], of = isPair && around.length === 1 ? [centre[0] - across, centre[1]] : centre;
    const places = new Map(nodes.filter((node) => node.isCentre).map((node) => [node.id, of]));
    around.forEach((node, place) => {
      const angle = (2 * Math.PI * place) / around.length - (nodes.length < 4 ? 0 : Math.PI / 2);
      places.set(node.id, [centre[0] + across * Math.cos(angle), centre[1] + down * Math.sin(angle)]);
    });
    return places;
  }

  /** Bent to its right, so that there and back are two lines. */
  arrow(edge, places, most, nodes) {
    const [ax, ay] = places.get(edge.from), [bx, by] = places.get(edge.to);
    const length = Math.hypot(bx - ax, by - ay) || 1, ux = (bx - ax) / length, uy = (by - ay) / length;
    const bend = Math.min(26, length * 0.14), mx = (ax + bx) / 2 - uy * bend, my = (ay + by) / 2 + ux * bend;
    const width = 1 + (MOST_WIDTH - 1) * (edge.weight / most), head = 5 + width;
    const dx = bx - mx, dy = by - my, far = Math.hypot(dx, dy) || 1, ex = dx / far, ey = dy / far;
    const tip = [bx - ex * (NODE + 2), by - ey * (NODE + 2)], base = [tip[0] - ex * head, tip[1] - ey * head];
    const side = (sign) => `${(base[0] - sign * ey * head * 0.5).toFixed(1)} ${(base[1] + sign * ex * head * 0.5).toFixed(1)}`;
    const nameOf = (id) => nodes.find((node) => node.id === id).name;
    const title = svg("title");
    title.textContent = `${nameOf(edge.from)} → ${nameOf(edge.to)}: ${number(edge.weight)} ${edge.unit}`;
    const line = svg("path", { d: `M${ax.toFixed(1)} ${ay.toFixed(1)}Q${mx.toFixed(1)} ${my.toFixed(1)} ${base[0].toFixed(1)} ${base[1].toFixed(1)}`, "stroke-width": width.toFixed(1) });
    const point = svg("path", { class: "head", d: `M${tip[0].toFixed(1)} ${tip[1].toFixed(1)}L${side(1)}L${side(-1)}Z` });
    const group = svg("g", { class: nodes.find((node) => node.id === edge.from).isCentre ? "arrow out" : "arrow" });
    group.append(title, line, point);
    return group;
  }

  dot(node, [x, y]) {
    const above = y < this.height / 2 - 1 || node.isCentre;
    const text = svg("text", { x: x.toFixed(1), y: (y + (above ? -13 : 24)).toFixed(1), "text-anchor": "middle" });
    text.textContent = node.name.length > MOST_LABEL ? `${node.name.slice(0, MOST_LABEL - 1)}…` : node.name;
    const title = svg("title");
    title.textContent = node.name;
    const group = svg("g", { class: `dot ${node.isCentre ? "centre" : ""} ${node.isDead ? "dead" : ""}` });
    group.append(title, svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: node.isCentre ? NODE + 2 : NODE }), text);
    return group;
  }
}
