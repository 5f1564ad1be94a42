// All nodes on one page.

import { Chart } from "./chart.js";
import { ago, byId, fillFacts, make, number, say, short } from "./dom.js";
import { tell } from "./live.js";
import { Table } from "./table.js";

const PAUSE_MS = 3000, MAX_POINTS = 100;

const chart = new Chart(byId("charts"), "Mean reward of sampled answers, by round", { floor: 0, lines: true });
chart.figure.classList.add("large");

const of = (name) => (node) => node.summary[name];
const nowS = () => Date.now() / 1000;
const table = new Table(byId("nodes-table"), "All nodes", [
  { key: "name", title: "Node", kind: "name", render: link, sort: of("name") },
  { key: "state", title: "State", text: state, sort: state, title_of: (node) => node.error },
  { key: "round", title: "Round", kind: "number", text: (node) => number(node.summary.round), sort: of("round") },
  { key: "reward", title: "Reward", kind: "number", text: (node) => number(node.summary.reward, 3), sort: of("reward") },
  { key: "speed", title: "Tokens/s", kind: "number", text: (node) => short(node.summary.tokens_per_s), sort: of("tokens_per_s") },
  { key: "peers", title: "Peers", kind: "number", text: (node) => number(node.summary.peers), sort: of("peers") },
  { key: "groups", title: "Peers’ groups", kind: "number", text: (node) => number(node.summary.swarm_groups), sort: of("swarm_groups"), hint: "Groups of peers that it trained on" },
  { key: "merges", title: "Merges", kind: "number", text: (node) => number(node.summary.merges), sort: of("merges") },
  { key: "address", title: "Address", kind: "code", text: (node) => node.address, sort: (node) => node.address },
  { key: "seen", title: "Answered", kind: "number", text: (node) => (node.seen_at ? ago(node.seen_at, nowS()) : "never"), sort: (node) => node.seen_at },
], (node) => node.key, "No node found yet. The names are looked up every 15 s.");

function state(node) {
  return node.is_alive ? String(node.summary.phase) : "unreachable";
}

function link(cell, node) {
  const name = node.summary.name || node.address;
  const anchor = cell.firstChild || cell.appendChild(make("a", { href: `node/${encodeURIComponent(node.key)}/` }));
  say(anchor, name);
}

/** All curves over the same buckets of rounds; gaps within a curve are filled with what came before. */
function together(nodes) {
  const curves = nodes.map((node) => [node.summary.name || node.address, node.summary.curve]).filter(([, curve]) => curve && curve.start.length);
  const last = curves.reduce((most, [, curve]) => Math.max(most, curve.start[curve.start.length - 1]), 0);
  const width = Math.max(1, Math.ceil((last + 1) / MAX_POINTS));
  const start = Array.from({ length: curves.length ? Math.floor(last / width) + 1 : 0 }, (_, place) => place * width);
  return { width, start, curves: curves.map(([name, curve]) => ({ name, values: onto(start.length, width, curve) })) };
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

function show(told) {
  const nodes = told.nodes, alive = nodes.filter((node) => node.is_alive);
  const sum = (name) => alive.reduce((total, node) => total + (node.summary[name] || 0), 0);
  const rewards = alive.map(of("reward")).filter((value) => typeof value === "number");
  fillFacts(byId("tiles"), [
    ["Nodes answering", `${alive.length} of ${nodes.length}`],
    ["Mean reward", rewards.length ? number(rewards.reduce((a, b) => a + b) / rewards.length, 3) : "–"],
    ["Tokens/s", short(sum("tokens_per_s"))],
    ["Rounds", short(sum("round"))],
    ["Groups from peers", short(sum("swarm_groups"))],
    ["Merges", short(sum("merges"))],
  ]);
  table.show(nodes);
  chart.show(together(nodes));
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
ask();
