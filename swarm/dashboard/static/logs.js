// The last lines of the node's logs, newest last. The node searches; what is shown stays the same elements while lines come.

import { byId, make, say } from "./dom.js";

const PAUSE_MS = 3000, TYPING_MS = 350, NEAR_END_PX = 40;
const keyOf = (record) => `${record.time} ${record.level} ${record.logger} ${record.message}`;

export class Logs {
  /** `headers()`: what a request of them needs. */
  constructor(headers) {
    this.headers = headers;
    this.keys = [];
    this.request = 0;
    this.isShown = false;
    this.isEnded = false;
    this.timer = 0;
    byId("logs-level").addEventListener("change", () => this.load());
    byId("logs-find").addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.load(), TYPING_MS);
    });
    document.addEventListener("visibilitychange", () => this.load());
  }

  /** Whether the view of the logs is looked at: only then it asks for lines. */
  see(isShown) {
    this.isShown = isShown;
    this.load();
  }

  async load() {
    clearTimeout(this.timer);
    if (!this.isShown || document.hidden) return;
    const request = ++this.request, level = byId("logs-level").value, find = byId("logs-find").value.trim();
    try {
      const answer = await fetch(`api/logs?${new URLSearchParams({ level, find })}`, { headers: this.headers(), cache: "no-store" });
      const told = await answer.json();
      if (request !== this.request) return;  // something else was asked for meanwhile
      if (!answer.ok) throw new Error(told.error || `status ${answer.status}`);
      this.show(told, level || find);
    } catch (error) {
      say(byId("logs-note"), `The logs could not be loaded: ${error.message}`);
    }
    if (request === this.request && !this.isEnded) this.timer = setTimeout(() => this.load(), PAUSE_MS);
  }

  show({ records, is_whole: isWhole }, isFiltered) {
    say(byId("logs-note"), !records.length ? (isFiltered ? "No line fits." : "No line yet.")
      : isWhole ? "The newest lines are at the end." : "The newest lines are at the end. Folders, addresses and possible secrets are shown as “…”, and of a traceback the last line; “swarm logs” shows all, and so does the node's own page with its token.");
    const region = byId("log-lines"), list = region.firstElementChild, keys = records.map(keyOf);
    const isAtEnd = region.scrollHeight - region.scrollTop - region.clientHeight < NEAR_END_PX;
    const kept = this.keys.length ? keys.lastIndexOf(this.keys[this.keys.length - 1]) : -1;
    const first = kept < 0 ? -1 : this.keys.length - 1 - kept;  // where among the old lines the new ones begin
    const isContinued = first >= 0 && keys.slice(0, kept + 1).every((key, place) => key === this.keys[first + place]);
    if (isContinued) for (let gone = 0; gone < first; gone++) list.firstElementChild.remove();
    else list.replaceChildren();
    list.append(...records.slice(isContinued ? kept + 1 : 0).map(line));
    this.keys = keys;
    region.hidden = !records.length;
    if (isAtEnd || !isContinued) region.scrollTop = region.scrollHeight;
  }
}

function line({ time, level, logger, message }) {
  return make("li", { "data-level": level }, make("time", {}, time.replace(/,\d+$/, "")), " ", make("b", { class: "level" }, level), " ",
    make("span", { class: "logger" }, logger), " ", make("span", { class: "message" }, message));
}
