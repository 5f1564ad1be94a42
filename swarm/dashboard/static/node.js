// The page of one node.

import { Chart } from "./chart.js";
import { Controls, removeControls } from "./controls.js";
import { ago, byId, bytes, duration, fillFacts, make, number, say, short, showIf } from "./dom.js";
import { Live } from "./live.js";
import { Rollouts } from "./rollouts.js";
import { Table } from "./table.js";

const view = { status: {}, peers: [], series: { start: [], width: 1 }, merges: [], reasons: {}, swarm: "", mergesAdapters: false, skewS: 0, dirty: new Set() };
const nowS = () => Date.now() / 1000 + view.skewS;
const isViewed = document.body.dataset.mode === "viewed";

// ---- parts ---------------------------------------------------------------------------------------------------------

const CHARTS = { reward: ["Reward", { floor: 0 }], entropy: ["Entropy", { unit: " nats", floor: 0 }], tokens_per_s: ["Throughput", { unit: " tokens/s", floor: 0 }], staleness: ["Staleness", { unit: " versions", floor: 0 }] };
const charts = Object.entries(CHARTS).map(([name, [title, options]]) => [name, new Chart(byId("charts"), title, options)]);

const peers = new Table(byId("peers-table"), "Peers of this node", [
  { key: "name", title: "Name", kind: "name", text: (p) => p.name || "–", sort: (p) => p.name, title_of: (p) => p.peer_id || "" },
  { key: "lineage", title: "Lineage", kind: "code", text: (p) => (p.lineage ? String(p.lineage).slice(0, 8) : "–"), sort: (p) => p.lineage, title_of: (p) => p.lineage || "", hint: "Nodes of the same lineage can share log-probs and merge" },
  { key: "weight", title: "Trust", kind: "number", text: (p) => number(p.weight, 2), sort: (p) => p.weight, hint: "How reliable its records were on this node, from 0 to 1; a stranger has 0.5" },
  { key: "reward", title: "Reward", kind: "number", text: (p) => number(p.reward_mean, 2), sort: (p) => p.reward_mean, hint: "Mean reward of its admitted groups, computed by this node" },
  { key: "version", title: "Version", kind: "number", text: (p) => number(p.policy_version), sort: (p) => p.policy_version },
  { key: "groups", title: "Groups", kind: "number", text: (p) => number(p.groups_admitted), sort: (p) => p.groups_admitted, hint: "Groups of this peer that were admitted" },
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
], ([reason]) => reason, "Nothing yet.");
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

const controls = isViewed ? null : new Controls(() => rollouts.again());
const rollouts = new Rollouts(() => (controls ? controls.headers() : {}), () => view.reasons);
if (isViewed) {
  removeControls();
  byId("home").href = "../../";
  byId("home").title = "All nodes";
  for (const id of ["metrics-link", "health-link"]) byId(id).remove();
}

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
    showIf(document.querySelector(".find"), view.peers.length > 8);
  },
  series: () => {
    for (const [name, chart] of charts) chart.show({ start: view.series.start, width: view.series.width, ...view.series[name] });
    const { width, start } = view.series;
    say(byId("curves-note"), !start.length ? "The curves begin with the first round."
      : width > 1 ? `One point for ${width} rounds: the line is their smoothed mean, the shaded area shows minimum and maximum. Arrow keys read values.`
        : "One point per round; the bold line is smoothed. Arrow keys read values.");
  },
  merges: () => merges.show(view.merges),
};

function drawStatus() {
  const s = view.status, row = s.last_round || {};
  const name = s.peer_name || "This node";
  say(byId("name"), name);
  const title = `${row["rollout/reward_mean"] === undefined ? "" : `${number(row["rollout/reward_mean"], 2)} · `}${name} – swarm`;
  if (document.title !== title) document.title = title;
  say(byId("phase"), s.phase || "starting");
  byId("phase").dataset.phase = s.phase || "starting";
  say(byId("about"), [s.started_at ? `for ${duration(nowS() - s.started_at)}` : "", view.swarm ? `in the swarm “${view.swarm}”` : ""].filter(Boolean).join(" "));
  say(byId("peer-id"), s.peer_id || "");
  fillFacts(byId("tiles"), [
    ["Reward", number(row["rollout/reward_mean"], 3)],
    ["Round", number(s.round)],
    ["Policy version", number(s.policy_version)],
    ["Tokens/s", short(row["rollout/tokens_per_s"])],
    ["Round time", row["time/round_s"] === undefined ? "–" : `${number(row["time/round_s"], 1)} s`],
    ["Connected peers", number(row["network/peers"])],
    ["Own groups", short(row["train/own_groups_total"])],
    ["Peers’ groups", short(row["train/swarm_groups_total"])],
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
  view.skewS = state.now_s - Date.now() / 1000;
  Object.assign(view, { status: state.status, peers: state.peers, series: state.series, merges: state.merges, reasons: state.reasons, swarm: state.swarm, mergesAdapters: state.merges_adapters });
  say(byId("version"), `swarm ${state.version}`);
  if (controls) controls.show(state.controls);
  rollouts.announce(state.rollouts);
  mark("status", "peers", "series", "merges");
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
  for (const name of Object.keys(CHARTS)) for (const kind of ["mean", "min", "max"]) series[name][kind][place] = point[name][kind][0];
  mark("series");
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
  rollouts: (event) => rollouts.announce(event.number),
  controls: (event) => controls && controls.show(event.controls),
});
live.start();
