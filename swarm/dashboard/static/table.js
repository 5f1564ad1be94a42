// A table whose columns sort by a button in their header, and whose rows stay the same elements while their values change.

import { make, say } from "./dom.js";

export class Table {
  /** `columns`: {key, title, text(row), sort(row)?, kind?: "number"|"name", hint?}; `keyOf(row)`: what names a row. */
  constructor(place, caption, columns, keyOf, empty) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.rows = null;  // not told yet: then there is nothing to say of it
    this.lines = new Map();
    this.sorted = null;
    this.falls = false;
    this.filter = () => true;
    this.body = make("tbody");
    this.empty = make("p", { class: "empty" }, empty);
    this.heads = columns.map((column) => this.head(column));
    const table = make("table", {}, make("caption", { class: "hidden" }, caption),
      make("thead", {}, make("tr", {}, ...this.heads)), this.body);
    this.region = make("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, table);
    place.append(this.region, this.empty);
    this.draw();
  }

  head(column) {
    const kind = column.kind || null;
    if (!column.sort) return make("th", { scope: "col", class: kind, title: column.hint }, column.title);
    const button = make("button", { type: "button", title: column.hint, onclick: () => this.sortBy(column) }, column.title);
    return make("th", { scope: "col", class: kind, "aria-sort": "none" }, button);
  }

  sortBy(column, falls = this.sorted === column ? !this.falls : column.kind === "number") {
    this.sorted = column;
    this.falls = falls;
    this.heads.forEach((head, place) => {
      if (!this.columns[place].sort) return;
      const isThis = this.columns[place] === column;
      head.setAttribute("aria-sort", isThis ? (falls ? "descending" : "ascending") : "none");
    });
    this.draw();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const shown = (this.rows || []).filter(this.filter);
    if (this.sorted) {
      const { sort } = this.sorted, sign = this.falls ? -1 : 1;
      shown.sort((a, b) => sign * compare(sort(a), sort(b), sign));
    }
    const kept = new Set();
    let before = null;
    for (const row of shown) {
      const key = this.keyOf(row);
      if (kept.has(key)) continue;
      kept.add(key);
      const line = this.line(key);
      this.columns.forEach((column, place) => this.fill(line.cells[place], column, row));
      const wanted = before ? before.nextSibling : this.body.firstChild;
      if (wanted !== line) this.body.insertBefore(line, wanted);
      before = line;
    }
    for (const [key, line] of this.lines) {
      if (kept.has(key)) continue;
      line.remove();
      this.lines.delete(key);
    }
    this.region.hidden = shown.length === 0;
    this.empty.hidden = this.rows === null || shown.length > 0;
  }

  line(key) {
    let line = this.lines.get(key);
    if (!line) {
      line = make("tr", {}, ...this.columns.map((column) =>
        column.kind === "name" ? make("th", { scope: "row", class: "name" }) : make("td", { class: column.kind || null })));
      this.lines.set(key, line);
    }
    return line;
  }

  fill(cell, column, row) {
    if (column.render) column.render(cell, row);
    else say(cell, column.text(row));
    if (column.title_of) {
      const title = column.title_of(row);
      if (cell.title !== title) cell.title = title;
    }
  }
}

/** What is missing comes last, whichever way it is sorted. */
function compare(a, b, sign) {
  const lacksA = a === null || a === undefined, lacksB = b === null || b === undefined;
  if (lacksA || lacksB) return sign * (lacksA - lacksB);
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}
