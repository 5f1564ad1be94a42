// Recent groups to read, by page, kind and text; the node searches. What is open stays as it is until its reader asks for newer ones.

import { ago, byId, make, number, say, showIf } from "./dom.js";

const PAUSE_MS = 4000, TYPING_MS = 350;
const VERDICTS = { own: "own", admitted: "admitted", refused: "rejected" };
const SPEAKERS = { policy: "policy", user: "environment", tool: "tool", "left out": "left out" };

export class Rollouts {
  /** `headers()`: what a request of them needs; `reasons()`: plain words by reason. */
  constructor(headers, reasons) {
    this.headers = headers;
    this.reasons = reasons;
    this.place = byId("groups");
    this.items = new Map();
    this.latest = -1;
    this.loaded = -1;
    this.page = 0;
    this.asked = 0;
    this.timer = 0;
    this.request = 0;
    this.isSeen = false;
    byId("rollouts-newer").addEventListener("click", () => this.turnTo(0));
    byId("page-before").addEventListener("click", () => this.turnTo(this.page - 1));
    byId("page-after").addEventListener("click", () => this.turnTo(this.page + 1));
    byId("kinds").addEventListener("change", () => this.turnTo(0));
    byId("rollouts-find").addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.turnTo(0), TYPING_MS);
    });
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      this.heed();
    }, { rootMargin: "200px" }).observe(byId("groups-section"));
  }

  /** The node has groups up to this number. */
  announce(latest) {
    this.latest = latest;
    if (!latest) say(byId("rollouts-note"), "None yet.");
    this.heed();
  }

  again() {
    this.loaded = -1;
    this.heed();
  }

  turnTo(page) {
    this.page = Math.max(0, page);
    this.load();
  }

  heed() {
    const isNew = this.latest > 0 && this.latest !== this.loaded;
    const isRead = this.page > 0 || [...this.items.values()].some((item) => item.open);
    showIf(byId("rollouts-newer"), isNew && isRead);
    if (!isNew || isRead || !this.isSeen || this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.load();
    }, Math.max(0, this.asked + PAUSE_MS - performance.now()));
  }

  async load() {
    this.asked = performance.now();
    const latest = this.latest, request = ++this.request;
    const kind = document.querySelector("#kinds input:checked").value, find = byId("rollouts-find").value.trim();
    try {
      const answer = await fetch(`api/rollouts?${new URLSearchParams({ kind, find, page: this.page })}`, { headers: this.headers(), cache: "no-store" });
      const told = await answer.json();
      if (request !== this.request) return;  // something else was asked for meanwhile
      this.loaded = latest;
      if (answer.ok) this.show(told, find);
      else say(byId("rollouts-note"), told.error);
    } catch {
      say(byId("rollouts-note"), "The rollouts could not be loaded. The page tries again when there are new ones.");
    }
    this.heed();
  }

  show(told, find) {
    const nowS = Date.now() / 1000, kept = new Map();
    for (const group of told.groups) {
      const item = this.items.get(group.number) || this.item(group);
      say(item.querySelector(".when"), ago(group.time_s, nowS));
      kept.set(group.number, item);
    }
    this.items = kept;
    this.place.replaceChildren(...kept.values());
    this.page = told.page;
    const found = told.found === 1 ? "1 group" : `${number(told.found)} groups`;
    const unread = told.unread ? ` The prompts of ${number(told.unread)} are not read yet: search again.` : "";
    say(byId("rollouts-note"), told.found ? `${found}${find ? ` with “${find}”` : ""}, from memory: the newest of each kind. Long texts are cut. Texts of peers are shown unchanged.${unread}` : find ? `Nothing with “${find}”.${unread}` : "None yet.");
    say(byId("page-of"), `page ${number(told.page + 1)} of ${number(told.pages)}`);
    byId("page-before").disabled = told.page === 0;
    byId("page-after").disabled = told.page + 1 >= told.pages;
    for (const id of ["page-before", "page-after", "page-of"]) showIf(byId(id), told.pages > 1);
  }

  item(group) {
    const rewards = group.answers.map((answer) => answer.reward);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
    const verdict = make("span", { class: `verdict ${group.kind}` }, VERDICTS[group.kind] || group.kind);
    const first = group.prompt === null ? "" : group.prompt.split("\n").find((line) => line.trim()) || "";
    const summary = make("summary", {}, verdict,
      make("span", { class: "source" }, group.source || "unknown task"),
      make("span", { class: "begins" }, first),
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
      group.prompt === null ? make("p", { class: "note" }, "Not here: this node cannot rebuild the prompt, or had no time for it yet.") : text(group.prompt));
    const answers = make("ol", { class: "answers" }, ...group.answers.map((answer) => this.answer(answer, group.kind === "refused")));
    item.append(make("h4", {}, `Answers${group.num_answers > group.answers.length ? `, ${group.answers.length} of ${group.num_answers}` : ""}`),
      group.answers.length ? answers : make("p", { class: "note" }, "The body could not be read or was not opened."));
  }

  answer(answer, isClaimed) {
    const isEpisode = answer.parts.length > 1;
    const said = make("div", { class: isEpisode ? "said" : "said alone" });
    for (const [who, words] of answer.parts) {
      said.append(isEpisode ? make("div", { class: `turn ${who === "policy" ? "of-policy" : ""}` }, make("span", { class: "who" }, SPEAKERS[who] || who), text(words)) : text(words));
    }
    const facts = [answer.tokens === 1 ? "1 token" : `${number(answer.tokens)} tokens`, answer.is_cut ? "not ended by itself" : "",
      ...Object.entries(answer.signals).map(([name, value]) => `${name} ${number(value, 2)}`)].filter(Boolean);
    const final = answer.final === null ? null : make("p", { class: "final" }, "Final answer: ", answer.final === "" ? "none found" : make("code", {}, answer.final));
    said.append(make("div", { class: "below" }, final, make("p", { class: "note" }, facts.join(" · "))));
    return make("li", {}, make("span", { class: `reward ${answer.reward > 0.5 ? "good" : ""}` }, `${isClaimed ? "claimed " : ""}${number(answer.reward, 2)}`), said);
  }
}

const text = (content) => make("pre", { dir: "auto", tabindex: content.length > 400 ? "0" : null }, content === "" ? "(empty)" : content);
