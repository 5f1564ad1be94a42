// The page of one node.

import { axis, follow } from "./axis.js";
import { Chart, ends, redraw } from "./chart.js";
import { Controls, removeControls } from "./controls.js";
import { ago, byId, bytes, duration, fillFacts, make, moment, number, say, short, showIf } from "./dom.js";
import { Live } from "./live.js";
import { Logs } from "./logs.js";
import { SwarmMap } from "./map.js";
import { Rollouts } from "./rollouts.js";
import { Table } from "./table.js";

const NO_EVALUATIONS = { start: [], time_s: [], mean: [], sources: {} };
const view = { status: {}, peers: [], series: { start: [], width: 1 }, evaluations: NO_EVALUATIONS, merges: [], reasons: {}, swarm: "", mergesAdapters: false, maxRounds: null, isLoading: false, isEnded: false, part: null, skewS: 0, dirty: new Set() };
const nowS = () => Date.now() / 1000 + view.skewS;
const isViewed = document.body.dataset.mode === "viewed";

// ---- parts ---------------------------------------------------------------------------------------------------------

// Of one metric: its title, and the options of its chart. Of several: `lines`, and how its curves are found.
const NOW = {
  held_out: ["Reward on held-out tasks", { floor: 0, lines: true }],
  reward: ["Reward of sampled answers", { floor: 0 }],
  share: ["Groups trained on in a round", { floor: 0, lines: true }],
  tokens_per_s: ["Throughput", { unit: " tokens/s", floor: 0 }],
};
const LEARNING = {
  held_out_sources: ["Held-out reward by task", { floor: 0, lines: true }],
  sources: ["Sampled reward by task", { floor: 0, lines: true }],
  signals: ["Reward by signal", { floor: 0, lines: true }],
  loss: ["Loss", {}],
  grad_norm: ["Gradient norm", { floor: 0 }],
  kl: ["KL to the base", { unit: " nats", floor: 0, isSparse: true }],
  entropy: ["Entropy", { unit: " nats", floor: 0 }],
  clipped: ["Clipped tokens", { floor: 0, unit: " of all" }],
  staleness: ["Staleness", { unit: " versions", floor: 0 }],
};
const made = (place, charts) => Object.entries(charts).map(([name, [title, options]]) => [name, new Chart(byId(place), title, options)]);
const charts = new Map([...made("charts-now", NOW), ...made("charts-learning", LEARNING)]);
const METRICS = ["reward", "own", "swarm", "loss", "grad_norm", "kl", "entropy", "clipped", "staleness", "tokens_per_s"];
const FAMILIES = ["sources", "signals"];

const map = new SwarmMap(byId("map"), "Who gave what to whom");
const peers = new Table(byId("peers-table"), "Peers of this node", [
  { key: "name", title: "Name", kind: "name", text: (p) => p.name || "–", sort: (p) => p.name, title_of: (p) => p.peer_id || "" },
  { key: "lineage", title: "Lineage", kind: "code", text: (p) => (p.lineage ? String(p.lineage).slice(0, 8) : "–"), sort: (p) => p.lineage, title_of: (p) => p.lineage || "", hint: "Nodes of the same lineage can share log-probs and merge" },
  { key: "weight", title: "Trust", kind: "number", text: (p) => number(p.weight, 2), sort: (p) => p.weight, hint: "How reliable its records were on this node, from 0 to 1; a stranger has 0.5" },
  { key: "reward", title: "Reward", kind: "number", text: (p) => number(p.reward_mean, 2), sort: (p) => p.reward_mean, hint: "Mean reward of its admitted groups, computed by this node" },
  { key: "version", title: "Version", kind: "number", text: (p) => number(p.policy_version), sort: (p) => p.policy_version },
  { key: "groups", title: "Groups", kind: "number", text: (p) => number(p.groups_admitted), sort: (p) => p.groups_admitted, hint: "Groups of this peer that were admitted" },
  { key: "taken", title: "Fetched", kind: "number", text: (p) => number(p.bodies_taken), sort: (p) => p.bodies_taken, hint: "Records of this node that the peer fetched here" },
  { key: "rejected", title: "Rejected", kind: "number", text: (p) => number(p.records_rejected), sort: (p) => p.records_rejected },
  { key: "seen", title: "Last seen", kind: "number", text: (p) => (p.banned_until > nowS() ? `ignored for ${duration(p.banned_until - nowS())}` : ago(p.last_seen_at, nowS())), sort: (p) => p.last_seen_at },
], (p) => p.peer_id, "No peer known yet. A node learns alone until it finds others.");
byId("peers-find").addEventListener("input", () => {
  const wanted = byId("peers-find").value.trim().toLowerCase();
  peers.filter = (p) => !wanted || [p.name, p.peer_id, p.lineage].some((text) => String(text || "").toLowerCase().includes(wanted));
  peers.draw();
});

const rejected = new Table(byId("rejected-table"), "Rejected records, by reason", [
  { key: "reason", title: "Reason", kind: "name", text: ([reason]) => reason, sort: ([reason]) => reason },
  { key: "words", title: "In plain words", kind: "words", text: ([reason]) => view.reasons[reason] || "" },
  { key: "count", title: "Count", kind: "number", text: ([, count]) => number(count), sort: ([, count]) => count },
], ([reason]) => reason, "Nothing was rejected.");
rejected.sortBy(rejected.columns[2], true);

const merges = new Table(byId("merges-table"), "Merges with partners, newest first", [
  { key: "partner", title: "Partner", kind: "name", text: (m) => nameOf(m.partner), title_of: (m) => m.partner || "" },
  { key: "round", title: "Round", kind: "number", text: (m) => number(m.round) },
  { key: "share", title: "Weight", kind: "number", text: (m) => number(m.share, 2), hint: "Weight of the partner in the mean" },
  { key: "lag", title: "Behind", kind: "number", text: (m) => number(m.lag_steps), hint: "Outer steps by which the partner was behind" },
  { key: "took", title: "Duration", kind: "number", text: (m) => (m.took_s === null ? "–" : `${number(m.took_s, 2)} s`) },
  { key: "when", title: "When", kind: "number", text: (m) => ago(m.time_s, nowS()) },
], (m) => m.round, "No merge yet.");

const alone = new Table(byId("alone-table"), "Outer steps without a partner, by reason", [
  { key: "reason", title: "Reason", kind: "name", text: ([reason]) => ALONE[reason] || `transfer: ${reason}`, title_of: ([reason]) => reason },
  { key: "count", title: "Steps", kind: "number", text: ([, count]) => number(count) },
], ([reason]) => reason, "Every outer step had a partner.");
const ALONE = { paused: "sharing was paused", nobody: "no other node was ready", declined: "all other nodes had partners", unpaired: "the network is off", unusable: "the received adapter was not of this lineage", lag: "the partner was too far behind", gate: "the merged adapter was worse on private tasks", unsendable: "this node's adapter cannot be sent" };

const stages = new Table(byId("stages-table"), "Stages of the policy", [
  { key: "stage", title: "Stage", kind: "name", text: (s) => `stage ${s.stage}` },
  { key: "layers", title: "Layers", kind: "number", text: (s) => `${s.first_layer} to ${s.end_layer - 1}` },
  { key: "holder", title: "Held by", kind: "code", text: (s) => s.holder },
], (s) => s.stage, "");

const settings = new Table(byId("config-table"), "Settings", [
  { key: "key", title: "Setting", kind: "name", text: (s) => s.key, sort: (s) => s.key },
  { key: "value", title: "Value", kind: "words", text: (s) => s.value || "not set" },
  { key: "default", title: "Default", kind: "words", text: (s) => (s.is_default ? "the same" : s.default || "not set") },
  { key: "origin", title: "Comes from", kind: "code", text: (s) => s.origin || (s.is_default ? "default" : "not recorded"), sort: (s) => s.origin },
], (s) => s.key, "No setting differs from its default, or none fits.");
function filterSettings() {
  const wanted = byId("config-find").value.trim().toLowerCase(), isChanged = byId("config-changed").checked;
  settings.filter = (s) => (!isChanged || !s.is_default) && [s.key, s.value, s.origin].some((text) => text.toLowerCase().includes(wanted));
  settings.draw();
}
byId("config-find").addEventListener("input", filterSettings);
byId("config-changed").addEventListener("change", filterSettings);

async function loadSettings() {
  try {
    const answer = await fetch("api/config", { headers: controls ? controls.headers() : {}, cache: "no-store" });
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error || `status ${answer.status}`);
    settings.show(told.settings);
    filterSettings();
  } catch (error) {
    say(byId("config-note"), `The settings could not be loaded: ${error.message}`);
  }
}

const controls = isViewed ? null : new Controls(() => { rollouts.again(); open(); });
const logs = new Logs(() => (controls ? controls.headers() : {}));
const rollouts = new Rollouts(() => (controls ? controls.headers() : {}), () => view.reasons);
if (isViewed) {
  removeControls();
  byId("home").href = "../../";
  byId("home").title = "All nodes";
  document.querySelector("footer").replaceChildren(byId("version"));
}

// ---- views ---------------------------------------------------------------------------------------------------------

const VIEWS = ["now", "learning", "swarm", "rollouts", "logs", "config"];

/** Show the view that the address names, the first one where it names none. */
function open() {
  const wanted = location.hash.slice(1), name = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const one of VIEWS) {
    showIf(byId(`view-${one}`), one === name);
    const link = document.querySelector(`nav a[href="#${one}"]`);
    if (one === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const id of ["tiles", "advice"]) byId(id).classList.toggle("elsewhere", name !== "now");
  showIf(byId("tools"), name === "now" || name === "learning");
  if (name === "config") loadSettings();
  logs.see(name === "logs");
}
addEventListener("hashchange", () => { open(); scrollTo(0, 0); });
open();

// ---- drawing -------------------------------------------------------------------------------------------------------

function nameOf(peerId) {
  const peer = view.peers.find((one) => one.peer_id === peerId);
  return peer && peer.name ? peer.name : peerId ? `…${String(peerId).slice(-8)}` : "–";
}

const PARTS = {
  status: drawStatus,
  peers: () => {
    peers.show(view.peers);
    say(byId("peers-title"), view.peers.length ? `Peers (${view.peers.length})` : "Peers");
    showIf(document.querySelector("#peers .find"), view.peers.length > 8);
    drawMap();
  },
  series: () => {
    if (!view.series.time_s) return;  // nothing has come yet
    const series = (axis.from !== null && view.part) || view.series, { width, start, time_s } = series;
    const places = { start, width, time_s, ends: view.part && endsOf(view.series) };
    for (const name of METRICS) if (charts.has(name)) charts.get(name).show({ ...places, ...series[name] });
    charts.get("share").show({ ...places, curves: [{ name: "own", values: series.own?.mean || [] }, { name: "of peers", values: series.swarm?.mean || [] }] });
    for (const family of FAMILIES) showCurves(family, { ...places, curves: named(series[family]) });
    say(byId("curves-note"), !start.length ? (view.isLoading ? "Earlier rounds are being read." : "The curves begin with the first round.")
      : width > 1 ? `One point for ${number(width)} rounds: the line is their smoothed mean, the shaded area shows minimum and maximum. ${HOW}`
        : `One point per round; the bold line is smoothed. ${HOW}`);
    const still = longestPause(view.series.time_s || []);
    say(byId("still"), still ? `No round ended for ${duration(still.lengthS)}, until ${moment(still.untilS)}.` : "");
  },
  evaluations: () => {
    const { start, time_s, mean, sources } = view.evaluations, places = { start, time_s, width: 1, isRaw: true };
    showCurves("held_out", { ...places, curves: start.length ? [{ name: "all tasks", values: mean }] : [] });
    showCurves("held_out_sources", { ...places, curves: named(sources) });
    drawStatus();
  },
  merges: () => merges.show(view.merges),
};

const HOW = "Draw over a curve to see a part of it, double click for the whole run. Arrow keys read values, + and − zoom.";
const named = (curves) => Object.entries(curves || {}).map(([name, values]) => ({ name, values }));

function showCurves(name, points) {
  const chart = charts.get(name);
  chart.show(points);
  showIf(chart.figure, points.curves.length > 0);
}

const MOST_ON_MAP = 12;

function drawMap() {
  const given = (p) => (p.groups_admitted || 0) + (p.bodies_taken || 0);
  const shown = [...view.peers].sort((a, b) => given(b) - given(a)).slice(0, MOST_ON_MAP);
  const nodes = [{ id: "", name: view.status.peer_name || "this node", isCentre: true }, ...shown.map((p) => ({ id: String(p.peer_id), name: String(p.name || p.peer_id) }))];
  const edges = shown.flatMap((p) => [
    { from: String(p.peer_id), to: "", weight: p.groups_admitted || 0, unit: "groups" },
    { from: "", to: String(p.peer_id), weight: p.bodies_taken || 0, unit: "records" },
  ]);
  map.show(nodes, edges, view.peers.length > MOST_ON_MAP ? `the ${MOST_ON_MAP} of ${view.peers.length} peers with most exchange` : "");
}

function change(values, digits) {
  const known = (values || []).filter((value) => typeof value === "number");
  if (!known.length) return "–";
  return known.length < 2 ? number(known[0], digits) : `${number(known[0], digits)} → ${number(known[known.length - 1], digits)}`;
}

/** The longest time between two rounds, where it is no ordinary one: {lengthS, untilS}, or null. */
function longestPause(all) {
  const times = all.filter((time) => time !== null);
  const pauses = times.slice(1).map((time, place) => ({ lengthS: time - times[place], untilS: time })).sort((a, b) => b.lengthS - a.lengthS);
  const usual = pauses[Math.floor(pauses.length / 2)], longest = pauses[0];
  return longest && longest.lengthS > Math.max(600, 20 * usual.lengthS) ? longest : null;
}

/** What the held-out reward was an hour ago, between the first and the last evaluation; else when it was measured. */
function heldOutBefore() {
  const { time_s: times = [], mean } = view.evaluations, now = nowS();
  const before = times.findLastIndex((time) => time !== null && time <= now - 3600);
  if (before > 0 && before < times.length - 1) return `${number(mean[before], 2)} ${duration(now - times[before])} ago`;
  return times.at(-1) ? `measured ${ago(times.at(-1), now)}` : "";
}

const PACE_POINTS = 30;

/** How long the rest takes at the pace of the last rounds; else when the last round ended. */
function roundNote(s) {
  const { start, time_s: times = [] } = view.series, last = start.length - 1;
  const first = Math.max(times.findIndex((time) => time >= s.started_at), last - PACE_POINTS, 0);
  const pace = (times[last] - times[first]) / (start[last] - start[first]);
  if (s.phase === "learning" && view.maxRounds > s.round && pace > 0) return `about ${duration(pace * (view.maxRounds - s.round))} left`;
  return times[last] ? `last one ${ago(times[last], nowS())}` : "";
}

function drawStatus() {
  const s = view.status, row = s.last_round || {};
  const name = s.peer_name || "This node";
  say(byId("name"), name);
  const title = `${row["rollout/reward_mean"] === undefined ? "" : `${number(row["rollout/reward_mean"], 2)} · `}${name} – swarm`;
  if (document.title !== title) document.title = title;
  say(byId("phase"), s.phase || "starting");
  byId("phase").dataset.phase = s.phase || "starting";
  say(byId("about"), [s.started_at && !view.isEnded ? `for ${duration(nowS() - s.started_at)}` : "", view.swarm ? `in the swarm “${view.swarm}”` : ""].filter(Boolean).join(" "));
  say(byId("peer-id"), s.peer_id || "");
  say(byId("verdict"), s.verdict ? `${s.verdict}: ${s.why || ""}` : "");
  byId("verdict").dataset.verdict = s.verdict || "";
  fillFacts(byId("tiles"), [
    ["Held-out reward", change(view.evaluations.mean, 2), heldOutBefore()],
    ["Round", view.maxRounds ? `${number(s.round)} of ${number(view.maxRounds)}` : number(s.round), roundNote(s)],
    ["Sampled reward", number(row["rollout/reward_mean"], 3)],
    ["Own + peers", row["train/own_groups_total"] === undefined ? "–" : `${short(row["train/own_groups_total"])} + ${short(row["train/swarm_groups_total"])}`],
    ["Tokens/s", short(row["rollout/tokens_per_s"])],
    ["Round time", row["time/round_s"] === undefined ? "–" : `${number(row["time/round_s"], 1)} s`],
    ["Connected peers", number(row["network/peers"])],
    ["Policy version", number(s.policy_version)],
  ]);
  drawAdvice(s, row);
  drawExchange(s, row);
  drawMerging(row);
  const parts = Array.isArray(s.stages) ? s.stages : [];
  showIf(byId("stages"), parts.length > 0);
  if (parts.length) stages.show(parts);
}

function drawAdvice(s, row) {
  const notices = [...(s.stuck || []).map((line) => `No progress: ${line}`), ...(row["health/warnings"] || []), ...((s.contribution || {}).advice || [])];
  const lines = [...new Set(notices)];  // advice repeats the warnings of training
  if (row["train/skip_reason"]) lines.push(`The last training step was skipped: ${row["train/skip_reason"]}`);
  const list = byId("advice");
  showIf(list, lines.length > 0);
  if (list.dataset.lines === lines.join("\n")) return;
  list.dataset.lines = lines.join("\n");
  list.replaceChildren(...lines.map((line) => make("li", {}, String(line))));
}

function drawExchange(s, row) {
  const c = s.contribution || {};
  const out = [["Records published", number(row["exchange/records_published"])], ["Rounds not published", number(row["exchange/rounds_not_published"])], ["Sent", bytes(row["exchange/bytes_sent"])]];
  if (c.bodies_taken !== undefined) out.splice(1, 0, ["Fetched by peers", number(c.bodies_taken)], ["Last fetched", ago(c.last_taken_at, nowS())]);
  if (c.reward_rank) out.push(["Reward among peers", `${c.reward_rank} of ${c.reward_rank_of}`]);
  fillFacts(byId("out"), out);
  fillFacts(byId("in"), [["Records admitted", number(row["exchange/records_admitted"])], ["Groups admitted", number(row["exchange/groups_admitted"])], ["Groups waiting", number(row["pool/groups"])], ["Received", bytes(row["exchange/bytes_received"])]]);
  rejected.show(Object.entries(row["exchange/rejected"] || {}).filter(([, count]) => count));
}

function drawMerging(row) {
  const steps = row["merge/outer_steps"];
  say(byId("merges-note"), steps === undefined ? (view.mergesAdapters ? "No round has ended yet." : "Merging is off (merging.enabled).") : `${number(row["merge/merges_total"])} of ${number(steps)} outer steps with a partner${row["merge/in_flight"] ? "; one exchange is in progress" : ""}.`);
  const isOn = steps !== undefined;
  showIf(byId("merges-table"), isOn);
  showIf(byId("alone-table"), isOn);
  if (isOn) alone.show(Object.entries(row["merge/reasons"] || {}).filter(([reason, count]) => reason !== "merged" && count));
}

/** Draw these parts with the next frame: many events cost one drawing, and a hidden tab none. */
function mark(...parts) {
  if (!view.dirty.size) requestAnimationFrame(() => {
    const dirty = [...view.dirty];
    view.dirty.clear();
    for (const part of dirty) PARTS[part]();
  });
  for (const part of parts) view.dirty.add(part);
}

// ---- what comes in -------------------------------------------------------------------------------------------------

function takeState(state) {
  for (const family of FAMILIES) state.series[family] = Object.assign(Object.create(null), state.series[family]);  // names are anybody's
  view.skewS = state.now_s - Date.now() / 1000;
  Object.assign(view, { status: state.status, peers: state.peers, series: state.series, evaluations: state.evaluations || NO_EVALUATIONS, merges: state.merges, reasons: state.reasons, swarm: state.swarm, mergesAdapters: state.merges_adapters, maxRounds: state.max_rounds, isLoading: state.is_loading });
  say(byId("version"), `swarm ${state.version}`);
  if (controls) controls.show(state.controls);
  if (state.is_ended) {  // they were in its memory
    view.isEnded = logs.isEnded = true;
    byId("controls").replaceChildren();
    for (const one of ["rollouts", "config"]) showIf(document.querySelector(`nav a[href="#${one}"]`), false);
  } else rollouts.announce(state.rollouts);
  mark("status", "peers", "series", "evaluations", "merges");
}

/** The first and the last place of a series on the axis. */
function endsOf({ start, time_s: times, width }) {
  const [all, more] = axis.kind === "round" ? [start, width - 1] : [times.filter((time) => time !== null), 0];
  return all.length ? [all[0], all[all.length - 1] + more] : null;
}

/** The range that is shown, on another axis: from the nearest points. */
function sameRange(kind) {
  const series = view.part || view.series, on = (name) => (name === "round" ? series.start : series.time_s);
  const near = (at) => on(kind)[on(axis.kind).reduce((best, x, place, all) => (x !== null && Math.abs(x - at) < Math.abs(all[best] - at) ? place : best), 0)];
  const [from, to] = [near(axis.from), near(axis.to)];
  return from < to ? [from, to] : null;
}

const PART_PAUSE_MS = 5000;
let partNumber = 0, partTimer = 0;

/** Ask for the points of the range that is shown: they are finer than those of the whole run. */
async function loadPart() {
  clearTimeout(partTimer);
  partTimer = 0;
  const number = ++partNumber, { kind, from, to } = axis;
  if (from === null) {
    view.part = null;
    mark("series");
    return;
  }
  redraw();
  try {
    const answer = await fetch(`api/series?${new URLSearchParams({ x: kind, from, to })}`, { cache: "no-store" });
    if (answer.ok && number === partNumber) {
      view.part = await answer.json();
      mark("series");
    }
  } catch { /* those of the whole run are shown */ }
}

/** The newest bucket, again or for the first time; where buckets became wider the whole curve is fetched. */
function takePoint(point) {
  const { series } = view;
  const start = point.start[0], last = series.start[series.start.length - 1];
  if (point.width !== series.width || (last !== undefined && start < last)) {
    live.start();
    return;
  }
  const place = start === last ? series.start.length - 1 : series.start.length;
  series.start[place] = start;
  series.time_s[place] = point.time_s[0];
  for (const name of METRICS) for (const kind of ["mean", "min", "max"]) series[name][kind][place] = point[name][kind][0];
  for (const family of FAMILIES) for (const [name, values] of Object.entries(point[family])) {
    const curve = series[family][name] ||= [];
    while (curve.length < place) curve.push(null);
    curve[place] = values[0];
  }
  mark("series");
  if (axis.from !== null && !partTimer) partTimer = setTimeout(loadPart, PART_PAUSE_MS);
}

const live = new Live(takeState, {
  status: (event) => {
    view.status = event.status;
    if (controls) controls.show(event.controls);
    mark("status", "merges");
  },
  peers: (event) => {
    view.peers = event.peers;
    mark("peers");
  },
  round: (event) => {
    if (event.merge) view.merges = [event.merge, ...view.merges].slice(0, 50);
    takePoint(event.point);
    if (event.merge) mark("merges");
  },
  evaluations: (event) => {
    view.evaluations = event.evaluations;
    mark("evaluations");
  },
  rollouts: (event) => rollouts.announce(event.number),
  controls: (event) => controls && controls.show(event.controls),
});
follow(["round", "time"], () => {
  view.part = null;
  mark("series", "evaluations");
  loadPart();
}, ends, sameRange);
live.start();
