// The line to the node: a snapshot, then events from where it ends; a fresh snapshot where events were missed.

import { byId, say } from "./dom.js";

const WORDS = { wait: "connecting", on: "live", off: "connection lost", ended: "ended, shown from its files" };
const FIRST_PAUSE_MS = 1000, LONGEST_PAUSE_MS = 15000;

export class Live {
  /** `onState(snapshot)`, `handlers`: {event name: function of its data}. */
  constructor(onState, handlers) {
    this.onState = onState;
    this.handlers = handlers;
    this.source = null;
    this.pause = FIRST_PAUSE_MS;
    this.timer = 0;
    this.isLoading = false;
  }

  async start() {
    clearTimeout(this.timer);
    if (this.isLoading) return;
    this.isLoading = true;
    if (this.source) this.source.close();
    try {
      const answer = await fetch("api/state", { cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const state = await answer.json();
      this.onState(state);
      if (state.is_ended) tell("ended");
      else this.listen(state.event_id);
    } catch (error) {
      this.lost(error);
    } finally {
      this.isLoading = false;
    }
  }

  listen(after) {
    const source = new EventSource(`api/events?after=${encodeURIComponent(after)}`);
    this.source = source;
    source.onopen = () => {
      this.pause = FIRST_PAUSE_MS;
      tell("on");
    };
    source.onerror = () => {
      if (source !== this.source) return;
      tell("off");
      if (source.readyState === EventSource.CLOSED) this.lost();  // else the browser tries again by itself
    };
    source.addEventListener("reset", () => this.later());  // not at once: a node may say so without end
    for (const [name, handle] of Object.entries(this.handlers)) {
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
  }

  lost() {
    tell("off");
    this.later();
  }

  later() {
    if (this.source) this.source.close();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.start(), this.pause);
    this.pause = Math.min(LONGEST_PAUSE_MS, this.pause * 2);
  }
}

export function tell(state) {
  const badge = byId("live");
  if (badge.dataset.state === state) return;
  badge.dataset.state = state;
  const since = new Date().toLocaleTimeString("en-GB");
  say(badge, state === "off" ? `${WORDS.off} at ${since}, trying again` : WORDS[state]);
  document.body.classList.toggle("stale", state === "off");
}
