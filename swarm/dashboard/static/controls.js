// Pause, resume, checkpoint: with the node's token, which stays in this tab and travels in a header only.

import { byId, make, say, showIf } from "./dom.js";

const STORE = `swarm-token ${location.origin}${location.pathname}`;

/** Of a link with #token=…; the address bar forgets it at once. */
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    history.replaceState(null, "", location.pathname + location.search);
    keep(given);
  }
  try { return given || sessionStorage.getItem(STORE) || ""; } catch { return given || ""; }
}

function keep(token) {
  try { sessionStorage.setItem(STORE, token); } catch { /* for this page only, then */ }
}

export class Controls {
  constructor(onToken) {
    this.token = takeToken();
    this.onToken = onToken;
    this.state = {};
    byId("pause-sharing").addEventListener("click", () => this.toggle("sharing"));
    byId("pause-training").addEventListener("click", () => this.toggle("training"));
    byId("checkpoint").addEventListener("click", () => this.act("checkpoint"));
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.token = byId("token").value.trim();
      byId("token").value = "";
      keep(this.token);
      byId("token-box").open = false;
      this.draw();
      this.onToken();
    });
    addEventListener("hashchange", () => {
      this.token = takeToken();
      this.draw();
    });
    this.draw();
  }

  show(state) {
    this.state = state;
    this.draw();
  }

  draw() {
    const { training_paused: training, sharing_paused: sharing, checkpoint_wanted: wanted, saved_round: saved } = this.state;
    const isReady = this.token !== "" && training !== undefined;
    for (const id of ["pause-sharing", "pause-training", "checkpoint"]) byId(id).disabled = !isReady;
    say(byId("pause-sharing"), sharing ? "Resume sharing" : "Pause sharing");
    say(byId("pause-training"), training ? "Resume training" : "Pause training");
    say(byId("checkpoint"), wanted ? "Saving after this round" : "Save a checkpoint");
    showIf(byId("token-box"), this.token === "");
    if (typeof saved === "number" && saved !== this.saved && this.saved !== undefined) say(byId("control-says"), `Round ${saved} is saved.`);
    this.saved = saved;
  }

  toggle(side) {
    return this.act(`${this.state[`${side}_paused`] ? "resume" : "pause"}-${side}`);
  }

  async act(action) {
    try {
      const answer = await fetch(`api/control/${action}`, { method: "POST", headers: this.headers() });
      const told = await answer.json();
      if (answer.status === 401) {
        this.token = "";
        keep("");
      }
      if (!answer.ok) throw new Error(told.error || `status ${answer.status}`);
      say(byId("control-says"), DONE[action]);
      this.show(told.controls);
    } catch (error) {
      say(byId("control-says"), `Failed: ${error.message}`);
      this.draw();
    }
  }

  headers() {
    return this.token ? { "x-swarm-token": this.token } : {};
  }
}

const DONE = {
  "pause-training": "Training pauses after the current round.",
  "resume-training": "Training continues.",
  "pause-sharing": "The node no longer publishes or fetches records.",
  "resume-sharing": "Sharing continues.",
  checkpoint: "A checkpoint is saved after the current round.",
};

/** For a page that only looks on. */
export function removeControls() {
  byId("controls").replaceChildren(make("p", { class: "hint" }, "This is a view in the overview. Open the node's own page to control it."));
}
