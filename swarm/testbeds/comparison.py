"""Compares the same nodes over the same number of rounds, with sharing and as silos.

All arms sample the same number of answers and drop groups without signal, and nodes of equal name have the same identity in
all, hence the same stream of tasks. What differs is where the groups of a batch come from.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from swarm.config import dump_toml
from swarm.errors import SwarmError
from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import SHARED, read_file, read_json, replace_file
from swarm.records.identity import MAX_KEY_FILE_BYTES
from swarm.report.live_table import NodeView
from swarm.report.plot import new_figure
from swarm.report.summary import summarize
from swarm.testbeds.profiles import NodePlan, PlanRequest, plan_nodes
from swarm.testbeds.testbed import CommandOf, Testbed, run_command

ARMS: Mapping[str, Mapping[str, str]] = {
    "sharing": {"sharing.own_groups": "4", "sharing.swarm_groups": "4"},
    "silos": {
        "network.backend": "off",
        "sharing.own_groups": "8",
        "sharing.swarm_groups": "0",
        "sharing.publish": "false",
    },
    "sharing-added": {"sharing.own_groups": "8", "sharing.swarm_groups": "8"},
}
"""sharing: others' groups in place of own ones (4/4). silos: own groups only (8/0). sharing-added: others' on top (8/8)."""
_BASELINE = "silos"
_COLORS = {"sharing": "tab:blue", "silos": "tab:orange", "sharing-added": "tab:green"}
_WINDOW_ROUNDS = 10
_MAX_RESULT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm with one seed."""

    arm: str
    seed: int
    digest: str
    """Of the nodes' configurations: a result is reused only for the same experiment."""
    cumulative_reward: float
    """Sum over rounds and nodes of the round's mean reward."""
    held_out_start: float
    held_out_end: float
    """Mean over nodes."""
    held_out_by_source: Mapping[str, float]
    """{task source: mean over nodes at the end}"""
    reward_by_round: Sequence[float]
    """Mean over nodes of each round's mean reward."""
    swarm_groups: int
    """Groups of others trained on, all nodes together."""
    duration_s: float
    """From the first to the last row of metrics."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs the arms one after another; finished ones are kept, an unfinished one is resumed."""

    folder: Path
    request: PlanRequest
    console: Console
    command_of: CommandOf = run_command

    def run(self, seeds: Sequence[int]) -> list[ArmResult]:
        """Raises SwarmError where a node fails; calling again goes on from there."""
        results = []
        for seed in seeds:
            for arm in ARMS:
                results.append(self._arm(arm, seed))
                write_results(results, self.folder / "results.json")
        return results

    def _arm(self, arm: str, seed: int) -> ArmResult:
        folder = self.folder / f"seed-{seed}" / arm
        plans = plan_nodes(folder, replace(self.request, seed=seed), ARMS[arm])
        digest, path = _digest(plans), folder / "result.json"
        if (kept := _read_result(path)) and kept.digest == digest:
            self.console.print(f"{arm}, seed {seed}: finished earlier", highlight=False)
            return kept
        for plan in plans:
            self._share_identity(plan, seed)
        views = Testbed(plans, self.console, self.command_of).run(f"{arm}, seed {seed}")
        if failed := [f"{view.name}: {view.state}" for view in views if view.state != "done"]:
            raise SwarmError(f"every node of {folder} must finish, got {'; '.join(failed)}; run again to resume")
        result = _result(arm, seed, digest, views)
        replace_file(path, json.dumps(asdict(result)) + "\n", SHARED)
        self.console.print(_told(result), highlight=False)
        return result

    def _share_identity(self, plan: NodePlan, seed: int) -> None:
        """The arms run one after another, so that one identity is never in two processes."""
        target = NodeFolder(plan.folder).identity
        for arm in ARMS:
            source = NodeFolder(self.folder / f"seed-{seed}" / arm / plan.name).identity
            if source.exists() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                replace_file(target, read_file(source, MAX_KEY_FILE_BYTES))


def write_results(results: Sequence[ArmResult], path: Path) -> None:
    replace_file(path, json.dumps([asdict(result) for result in results], indent=1) + "\n", SHARED)


def comparison_table(results: Sequence[ArmResult]) -> Table:
    """Every arm as mean ± standard deviation over seeds, and its difference to the silos seed by seed."""
    by_arm = _by_arm(results)
    table = Table(title=f"Sharing and silos, {len(by_arm[_BASELINE])} seeds", title_justify="left")
    table.add_column("")
    for header in ("cumulative reward", "held-out start", "held-out end"):
        table.add_column(header, justify="right", no_wrap=True)
    for arm, rows in by_arm.items():
        table.add_row(
            arm, _spread([r.cumulative_reward for r in rows], 1), _spread([r.held_out_start for r in rows], 3),
            _spread([r.held_out_end for r in rows], 3),
        )  # fmt: skip
    for arm in [name for name in by_arm if name != _BASELINE]:
        pairs = list(zip(by_arm[arm], by_arm[_BASELINE], strict=True))
        relative = [100 * (a.cumulative_reward / b.cumulative_reward - 1) for a, b in pairs if b.cumulative_reward]
        ends = [a.held_out_end - b.held_out_end for a, b in pairs]
        gain = _spread(relative, 1, sign="+") + " %" if relative else ""
        table.add_row(f"{arm} − {_BASELINE}", gain, "", _spread(ends, 3, sign="+"))
    return table


def plot_comparison(results: Sequence[ArmResult], path: Path) -> None:
    """Mean reward over rounds (line: mean of seeds, band: their range), and held-out reward of each seed."""
    figure, (left, right) = new_figure(2)
    for position, (arm, rows) in enumerate(_by_arm(results).items()):
        curves = [_smooth(row.reward_by_round) for row in rows]
        columns = list(zip(*curves, strict=False))
        rounds = range(1, len(columns) + 1)
        left.plot(rounds, [fmean(column) for column in columns], label=arm, color=_COLORS[arm])
        lows, highs = [min(column) for column in columns], [max(column) for column in columns]
        left.fill_between(rounds, lows, highs, alpha=0.2, color=_COLORS[arm], linewidth=0)
        ends = [row.held_out_end for row in rows]
        right.scatter([position] * len(ends), ends, color=_COLORS[arm])
        right.hlines(fmean(ends), position - 0.2, position + 0.2, color=_COLORS[arm])
    left.set(xlabel="round", ylabel="mean reward")
    left.set_title(f"sampled answers, mean of nodes and {_WINDOW_ROUNDS} rounds", loc="left", fontsize=10)
    left.legend(frameon=False, loc="lower right")
    right.set(xticks=range(len(ARMS)), xticklabels=list(ARMS), xlim=(-0.6, len(ARMS) - 0.4), ylabel="mean reward")
    right.set_title("held-out tasks at the end, one dot per seed", loc="left", fontsize=10)
    figure.savefig(path)


def _result(arm: str, seed: int, digest: str, views: Sequence[NodeView]) -> ArmResult:
    nodes = [summarize(view) for view in views]
    num_rounds = min(node.rounds for node in nodes)
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for node in nodes:
        for source, (_, end) in node.held_out_by_source.items():
            by_source[source] += [] if end is None else [end]
    times = [row["time_s"] for view in views for row in view.history.rounds]
    return ArmResult(
        arm=arm,
        seed=seed,
        digest=digest,
        cumulative_reward=sum(node.cumulative_reward for node in nodes),
        held_out_start=fmean(node.held_out_start or 0.0 for node in nodes),
        held_out_end=fmean(node.held_out_end or 0.0 for node in nodes),
        held_out_by_source={source: fmean(ends) for source, ends in sorted(by_source.items()) if ends},
        reward_by_round=[fmean(view.history.rewards[i] for view in views) for i in range(num_rounds)],
        swarm_groups=sum(node.swarm_groups for node in nodes),
        duration_s=max(times) - min(times),
    )


def _read_result(path: Path) -> ArmResult | None:
    try:
        return ArmResult(**read_json(path, _MAX_RESULT_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # written by another version, or torn: the arm is summed up again
        return None


def _digest(plans: Sequence[NodePlan]) -> str:
    return hashlib.sha256("".join(dump_toml(plan.config) for plan in plans).encode()).hexdigest()[:16]


def _by_arm(results: Sequence[ArmResult]) -> dict[str, list[ArmResult]]:
    """{arm: results in order of seeds}"""
    return {arm: sorted((r for r in results if r.arm == arm), key=lambda r: r.seed) for arm in ARMS}


def _smooth(values: Sequence[float]) -> list[float]:
    return [fmean(values[max(0, i + 1 - _WINDOW_ROUNDS) : i + 1]) for i in range(len(values))]


def _spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    if len(values) == 1:
        return f"{values[0]:{sign}.{digits}f}"
    return f"{fmean(values):{sign}.{digits}f} ± {stdev(values):.{digits}f}" if values else "?"


def _told(result: ArmResult) -> str:
    return (
        f"{result.arm}, seed {result.seed}: cumulative reward {result.cumulative_reward:.1f}, "
        f"held-out {result.held_out_start:.3f} → {result.held_out_end:.3f}, {result.duration_s:.0f} s"
    )
