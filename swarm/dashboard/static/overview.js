// All nodes on one page.

import { axis, follow } from "./axis.js";
import { Chart, ends } from "./chart.js";
import { ago, byId, fillFacts, make, number, say, short, showIf } from "./dom.js";
import { tell } from "./live.js";
import { SwarmMap } from "./map.js";
import { Table } from "./table.js";

const PAUSE_MS = 3000, MAX_POINTS = 100, MOST_ON_MAP = 24;

const heldOut = new Chart(byId("charts"), "Reward on held-out tasks", { floor: 0, lines: true });
const sampled = new Chart(byId("charts"), "Reward of sampled answers", { floor: 0, lines: true });
const map = new SwarmMap(byId("map"), "Who gave groups to whom");

const of = (name) => (node) => node.summary[name];
let shownNodes = [];
const nowS = () => Date.now() / 1000;
const nameOf = (node) => node.label || node.summary.name || node.address;
const last = (node) => node.summary.held_out?.reward.at(-1);
const table = new Table(byId("nodes-table"), "All nodes", [
  { key: "name", title: "Node", kind: "name", render: link, sort: nameOf, title_of: (node) => [node.summary.name, node.address && `at ${node.address}`].filter(Boolean).join(" ") },
  { key: "state", title: "State", render: (cell, node) => { say(cell, state(node)); cell.dataset.verdict = state(node); }, sort: state, title_of: (node) => node.error || "" },
  { key: "round", title: "Round", kind: "number", text: (node) => number(node.summary.round), sort: of("round") },
  { key: "held", title: "Held-out", kind: "number", text: (node) => number(last(node), 3), sort: last, hint: "Mean reward on held-out tasks, at the last evaluation" },
  { key: "reward", title: "Sampled", kind: "number", text: (node) => number(node.summary.reward, 3), sort: of("reward") },
  { key: "speed", title: "Tokens/s", kind: "number", text: (node) => short(node.summary.tokens_per_s), sort: of("tokens_per_s") },
  { key: "peers", title: "Peers", kind: "number", text: (node) => number(node.summary.peers), sort: of("peers") },
  { key: "own", title: "Own groups", kind: "number", text: (node) => number(node.summary.own_groups), sort: of("own_groups"), hint: "Own groups that it trained on" },
  { key: "groups", title: "Peers’ groups", kind: "number", text: (node) => number(node.summary.swarm_groups), sort: of("swarm_groups"), hint: "Groups of peers that it trained on" },
  { key: "merges", title: "Merges", kind: "number", text: (node) => number(node.summary.merges), sort: of("merges") },
  { key: "seen", title: "Answered", kind: "number", text: (node) => (node.seen_at ? ago(node.seen_at, nowS()) : "never"), sort: (node) => node.seen_at },
], (node) => node.key, "No node found yet. The names are looked up every 15 s.");

function state(node) {
  if (node.is_alive) return node.summary.verdict || node.summary.phase;
  if (node.address) return "unreachable";
  return node.summary.phase === "ended" ? "ended" : node.summary.verdict || "not running";
}

const MOST_WRONG = 8, LONGEST_LINE = 300;

/** What is wrong, a line for each, nodes without progress first; a node that ended in order is not. */
function drawWrong(nodes) {
  const down = nodes.filter((node) => ["unreachable", "not running", "stalled"].includes(state(node)));
  const lines = [
    ...down.map((node) => `${nameOf(node)}: ${state(node)}, ${(node.is_alive ? node.summary.why : node.error) || "nothing more is known"}`),
    ...nodes.filter((node) => node.is_alive).flatMap((node) => (node.summary.advice || []).map((line) => `${nameOf(node)}: ${line}`)),
  ].map((line) => line.slice(0, LONGEST_LINE));
  const shown = lines.slice(0, MOST_WRONG), list = byId("advice");
  if (lines.length > MOST_WRONG) shown.push(`and ${lines.length - MOST_WRONG} more`);
  showIf(list, shown.length > 0);
  if (list.dataset.lines === shown.join("\n")) return;
  list.dataset.lines = shown.join("\n");
  list.replaceChildren(...shown.map((line) => make("li", {}, line)));
}

const pairs = new Table(byId("pairs-table"), "Exchange per pair", [
  { key: "from", title: "From", kind: "name", text: (pair) => pair.fromName, sort: (pair) => pair.fromName },
  { key: "to", title: "To", text: (pair) => pair.toName, sort: (pair) => pair.toName },
  { key: "groups", title: "Groups admitted", kind: "number", text: (pair) => number(pair.weight), sort: (pair) => pair.weight, hint: "Groups of the first that the second admitted since it started" },
  { key: "taken", title: "Records fetched", kind: "number", text: (pair) => number(pair.taken), sort: (pair) => pair.taken, hint: "Records that the second fetched from the first itself; others may have passed them on" },
], (pair) => `${pair.from} ${pair.to}`, "Nothing was exchanged yet.");

/** What the nodes gave each other, by the ids of both. Peers that are not on this page are left out. */
function exchange(nodes) {
  const known = new Map(nodes.filter((node) => node.summary.peer_id).map((node) => [node.summary.peer_id, node]));
  const found = new Map();
  const pair = (from, to) => {
    const key = `${from} ${to}`;
    if (!found.has(key)) found.set(key, { from, to, fromName: nameOf(known.get(from)), toName: nameOf(known.get(to)), weight: 0, taken: 0, unit: "groups" });
    return found.get(key);
  };
  for (const [id, node] of known) for (const peer of node.summary.exchange || []) {
    if (!known.has(peer.peer_id) || peer.peer_id === id) continue;
    if (peer.groups_admitted) pair(peer.peer_id, id).weight = peer.groups_admitted;
    if (peer.bodies_taken) pair(id, peer.peer_id).taken = peer.bodies_taken;
  }
  return { pairs: [...found.values()], known };
}

function link(cell, node) {
  if (!node.has_page) {
    say(cell, nameOf(node));
    return;
  }
  const anchor = cell.firstElementChild || cell.appendChild(make("a", { href: `node/${encodeURIComponent(node.key)}/` }));
  say(anchor, nameOf(node));
}

/** All curves over the same buckets of rounds; gaps within a curve are filled with what came before. */
function together(nodes) {
  const curves = nodes.map((node) => [nameOf(node), node.summary.curve]).filter(([, curve]) => curve && curve.start.length);
  const last = curves.reduce((most, [, curve]) => Math.max(most, curve.start[curve.start.length - 1]), 0);
  const width = Math.max(1, Math.ceil((last + 1) / MAX_POINTS));
  const start = Array.from({ length: curves.length ? Math.floor(last / width) + 1 : 0 }, (_, place) => place * width);
  return { width, start, curves: curves.map(([name, curve]) => ({ name, values: onto(start.length, width, curve) })) };
}

/** The evaluations of all, over the rounds of any. */
function evaluated(nodes) {
  const curves = nodes.filter((node) => node.summary.held_out?.start.length);
  const start = [...new Set(curves.flatMap((node) => node.summary.held_out.start))].sort((a, b) => a - b);
  return { start, width: 1, isRaw: true, curves: curves.map((node) => {
    const { start: rounds, reward } = node.summary.held_out, at = new Map(rounds.map((round, place) => [round, reward[place]]));
    return { name: nameOf(node), values: start.map((round) => at.get(round) ?? null) };
  }) };
}

function onto(count, width, curve) {
  const sums = new Array(count).fill(0), counts = new Array(count).fill(0);
  curve.start.forEach((round, place) => {
    if (curve.reward[place] === null) return;
    sums[Math.floor(round / width)] += curve.reward[place];
    counts[Math.floor(round / width)] += 1;
  });
  const values = sums.map((sum, place) => (counts[place] ? sum / counts[place] : null));
  const end = values.findLastIndex((value) => value !== null);
  for (let place = 1; place < end; place++) values[place] ??= values[place - 1];
  return values;
}

/** Curves over the same parts of the time, by the clock or since the start of each run: rewards are means in each part. */
function timed(nodes, name) {
  const found = nodes.map((node) => {
    const { time_s: times = [], reward } = node.summary[name] || {}, begin = axis.kind === "start" ? beginOf(node) : 0;
    return { name: nameOf(node), points: times.flatMap((time, place) => (time === null || reward[place] === null ? [] : [[time - begin, reward[place]]])) };
  }).filter((curve) => curve.points.length);
  const all = found.flatMap((curve) => curve.points.map(([time]) => time));
  const first = all.reduce((a, b) => Math.min(a, b), axis.kind === "start" ? 0 : Infinity), last = all.reduce((a, b) => Math.max(a, b), first);
  const part = (last - first) / MAX_POINTS || 1;
  const times = all.length ? Array.from({ length: MAX_POINTS }, (_, place) => first + (place + 0.5) * part) : [];
  const within = ({ points }) => {
    const parts = times.map(() => []);
    for (const [time, reward] of points) parts[Math.min(MAX_POINTS - 1, Math.floor((time - first) / part))].push(reward);
    return parts.map((rewards) => (rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null));
  };
  return { time_s: times, part, reach: 2, isRaw: name === "held_out", curves: found.map((curve) => ({ name: curve.name, values: within(curve) })) };
}

/** When a run began, as far as is known: a process that was started again began later. */
function beginOf(node) {
  const { started_at: started, curve, held_out: heldOut } = node.summary;
  return [started, curve?.time_s?.[0], heldOut?.time_s?.[0]].filter((time) => typeof time === "number").reduce((a, b) => Math.min(a, b), Infinity);
}

function drawCurves() {
  const isByRound = axis.kind === "round";
  sampled.show(isByRound ? together(shownNodes) : timed(shownNodes, "curve"));
  heldOut.show(isByRound ? evaluated(shownNodes) : timed(shownNodes, "held_out"));
  const untimed = isByRound ? [] : shownNodes.filter((node) => node.summary.curve?.start.length && !node.summary.curve.time_s?.length);
  say(byId("axis-note"), untimed.length ? `Of an older version, which tells no times: ${untimed.map(nameOf).join(", ").slice(0, LONGEST_LINE)}` : "");
}

function show(told) {
  const nodes = [...told.nodes].sort((a, b) => nameOf(a).localeCompare(nameOf(b), "en", { numeric: true })), alive = nodes.filter((node) => node.is_alive);
  const sum = (name, some = nodes) => some.reduce((total, node) => total + (node.summary[name] || 0), 0);
  const mean = (values, digits = 3) => {
    const known = values.filter((value) => typeof value === "number");
    return known.length ? number(known.reduce((a, b) => a + b) / known.length, digits) : "–";
  };
  const measured = nodes.filter((node) => (node.summary.held_out?.reward.length || 0) > 1);
  const heldOutChange = `${mean(measured.map((node) => node.summary.held_out.reward[0]), 2)} → ${mean(measured.map(last), 2)}`;
  drawWrong(nodes);
  fillFacts(byId("tiles"), [
    ["Nodes answering", `${alive.length} of ${nodes.length}`],
    ["Held-out reward", measured.length ? heldOutChange : mean(nodes.map(last), 2), measured.length && measured.length < nodes.length ? `of ${measured.length} nodes` : ""],
    ["Sampled reward", mean(nodes.map(of("reward")))],
    ["Tokens/s", short(sum("tokens_per_s", alive))],
    ["Rounds", short(sum("round"))],
    ["Groups from peers", short(sum("swarm_groups"))],
    ...(nodes.some((node) => typeof node.summary.merges === "number") ? [["Merges", short(sum("merges"))]] : []),
  ]);
  table.show(nodes);
  shownNodes = nodes;
  drawCurves();
  const { pairs: exchanged, known } = exchange(nodes);
  pairs.show(exchanged);
  const shown = [...known].slice(0, MOST_ON_MAP).map(([id, node]) => ({ id, name: nameOf(node), isDead: !node.is_alive }));
  map.show(shown, exchanged, known.size > MOST_ON_MAP ? `the first ${MOST_ON_MAP} of ${known.size} nodes` : "");
  say(byId("version"), `swarm ${told.version}`);
}

async function ask() {
  try {
    const answer = await fetch("api/nodes", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const told = await answer.json();
    tell("on");
    requestAnimationFrame(() => show(told));
  } catch {
    tell("off");
  }
  setTimeout(ask, PAUSE_MS);
}

table.sortBy(table.columns[0], false);
pairs.sortBy(pairs.columns[2], true);
follow(["round", "start", "time"], drawCurves, ends);
ask();
