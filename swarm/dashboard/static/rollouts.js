// Recent groups to read. What is open stays as it is until its reader asks for newer ones.

import { ago, byId, make, number, say, showIf } from "./dom.js";

const PAUSE_MS = 4000;
const VERDICTS = { own: "own", admitted: "admitted", refused: "rejected" };

export class Rollouts {
  /** `headers()`: what a request of them needs; `reasons()`: plain words by reason. */
  constructor(headers, reasons) {
    this.headers = headers;
    this.reasons = reasons;
    this.place = byId("groups");
    this.items = new Map();
    this.latest = -1;
    this.loaded = -1;
    this.asked = 0;
    this.timer = 0;
    this.isSeen = false;
    byId("rollouts-newer").addEventListener("click", () => this.load());
    byId("kinds").addEventListener("change", () => this.filter());
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      this.heed();
    }, { rootMargin: "200px" }).observe(byId("rollouts"));
  }

  /** The node has groups up to this number. */
  announce(latest) {
    this.latest = latest;
    if (!latest) say(byId("rollouts-note"), "None yet.");
    else this.heed();
  }

  again() {
    this.loaded = -1;
    this.heed();
  }

  heed() {
    const isNew = this.latest !== this.loaded;
    const isRead = [...this.items.values()].some((item) => item.open);
    showIf(byId("rollouts-newer"), isNew && isRead);
    if (!isNew || isRead || !this.isSeen || this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.load();
    }, Math.max(0, this.asked + PAUSE_MS - performance.now()));
  }

  async load() {
    this.asked = performance.now();
    const latest = this.latest;
    try {
      const answer = await fetch("api/rollouts", { headers: this.headers(), cache: "no-store" });
      const told = await answer.json();
      this.loaded = latest;
      if (answer.ok) this.show(told.groups);
      else say(byId("rollouts-note"), told.error);
    } catch {
      say(byId("rollouts-note"), "The rollouts could not be loaded. The page tries again when there are new ones.");
    }
    this.heed();
  }

  show(groups) {
    const nowS = Date.now() / 1000;
    const kept = new Map();
    for (const group of groups) {
      const item = this.items.get(group.number) || this.item(group);
      say(item.querySelector(".when"), ago(group.time_s, nowS));
      kept.set(group.number, item);
    }
    this.items = kept;
    this.place.replaceChildren(...kept.values());
    this.filter();
  }

  filter() {
    const kind = document.querySelector("#kinds input:checked").value;
    let shown = 0;
    for (const item of this.items.values()) {
      item.hidden = kind !== "" && item.dataset.kind !== kind;
      shown += !item.hidden;
    }
    say(byId("rollouts-note"), shown ? "The newest groups of each kind, from memory. Long texts are cut. Texts of peers are shown unchanged." : "None yet.");
  }

  item(group) {
    const rewards = group.answers.map((answer) => answer.reward);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
    const verdict = make("span", { class: `verdict ${group.kind}` }, VERDICTS[group.kind] || group.kind);
    const summary = make("summary", {}, verdict,
      make("span", { class: "source" }, group.source || "unknown task"),
      make("span", { class: "author", title: group.author }, group.kind === "own" ? "this node" : group.name),
      make("span", { class: "mean" }, mean === null ? "" : `reward ${number(mean, 2)}`),
      make("span", { class: "when" }));
    const item = make("details", { class: "group card", "data-kind": group.kind, ontoggle: () => this.heed() }, summary);
    item.addEventListener("toggle", () => item.childElementCount === 1 && this.fill(item, group));
    return item;
  }

  /** Once it is opened. */
  fill(item, group) {
    if (group.reason) {
      const detail = group.detail ? ` (${group.detail})` : "";
      item.append(make("p", { class: "why" }, `${group.kind === "own" ? "Not shared" : "Rejected"}: `,
        make("code", {}, group.reason), ` – ${this.reasons()[group.reason] || ""}${detail}`));
    }
    const where = group.task ? `task ${group.task}, policy version ${group.policy_version}` : `policy version ${group.policy_version}`;
    item.append(make("p", { class: "note" }, where), make("h4", {}, "Prompt"),
      group.prompt === null ? make("p", { class: "note" }, "This node cannot rebuild the prompt.") : text(group.prompt));
    const answers = make("ol", { class: "answers" });
    for (const answer of group.answers) {
      answers.append(make("li", {}, make("span", { class: `reward ${answer.reward > 0.5 ? "good" : ""}` },
        `${group.kind === "refused" ? "claimed " : ""}${number(answer.reward, 2)}`), text(answer.text)));
    }
    item.append(make("h4", {}, `Answers${group.num_answers > group.answers.length ? `, ${group.answers.length} of ${group.num_answers}` : ""}`),
      group.answers.length ? answers : make("p", { class: "note" }, "The body could not be read or was not opened."));
  }
}

const text = (content) => make("pre", { dir: "auto", tabindex: content.length > 400 ? "0" : null }, content === "" ? "(empty)" : content);
