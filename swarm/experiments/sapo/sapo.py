"""The sharing experiment of SAPO (2509.08721) with the control that the paper lacks: 8/0 with the zero-advantage filter.

    time budget ─ calibrate ─▶ rounds ─▶ cells (arm × seed) ─▶ results ─▶ two views ─▶ table, curves, report

Every arm samples the same number of answers a round, so its sum of rewards compares at equal sampling, as the paper does. The
second view compares at equal numbers of answers trained on, of which sharing arms have more per round.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from swarm.errors import ConfigError
from swarm.experiments.cells import Cell, CellStore, Result, Say, compute
from swarm.experiments.sapo.tasks import NINE_TASKS, SAPO_TASKS, Mix
from swarm.machine.safe_files import SHARED, read_json, replace_file
from swarm.report.tables import Spread


@dataclass(frozen=True, slots=True)
class SapoArm:
    """I own and J groups of others in a batch. Every arm samples the same number of answers a round."""

    name: str
    own_groups: int
    swarm_groups: int
    filter_groups: bool = True
    """Whether own groups without reward differences are left out, as groups of others always are."""
    choice: Literal["uniform", "informative"] = "uniform"
    """By what groups of others are chosen: `sharing.choice`."""
    replay_groups: int = 0
    """Own groups of earlier rounds in a batch, on top: `training.replay_groups`."""


PUBLISHED = "8/0"
CONTROL = "8/0 + filter"
SHARING = "4/4"
ARMS = {
    arm.name: arm
    for arm in (
        SapoArm(PUBLISHED, 8, 0, filter_groups=False),
        SapoArm(CONTROL, 8, 0),
        SapoArm("6/2", 6, 2),
        SapoArm(SHARING, 4, 4),
        SapoArm("2/6", 2, 6),
        SapoArm("8/8", 8, 8),
        SapoArm("4/4 informative", 4, 4, choice="informative"),
        SapoArm("8/8 informative", 8, 8, choice="informative"),
        SapoArm("8/0 + replay", 8, 0, replay_groups=4),
    )
}
"""Those up to 2/6 are the paper's. 8/8 is a node's default: groups of others on top of the own ones."""
DEFAULT_ARMS = (PUBLISHED, CONTROL, "6/2", SHARING, "2/6")


def chosen_arms(text: str) -> tuple[SapoArm, ...]:
    """Arms by names with commas between them. Raises ConfigError for another name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise ConfigError(
            f"arms must be among {', '.join(ARMS)}, got {', '.join(unknown) or 'none'}; set --arms with commas"
        )
    return tuple(ARMS[name] for name in dict.fromkeys(names))


_CALIBRATION_ROUNDS = 3
_CALIBRATION_SEED = 10_000
_MARGIN = 0.9
_MAX_KEPT_BYTES = 1 << 20
_MIN_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class SapoPlan:
    """What to run."""

    arms: tuple[SapoArm, ...]
    seeds: tuple[int, ...]
    num_nodes: int = 8
    mix: Mix = "shared"
    base: str = NINE_TASKS
    """NINE_TASKS, or any `policy.base`."""
    groups_per_round: int = 8
    group_size: int = 8
    held_out_tasks: int = 8
    """Per source and node."""

    def cells(self, num_rounds: int) -> list[Cell]:
        """The two arms of the headline first, so that an experiment cut short has them with all seeds."""
        first = [arm for arm in self.arms if arm.name in (CONTROL, SHARING)]
        rest = [arm for arm in self.arms if arm not in first]
        return [self.cell(arm.name, seed, num_rounds) for arms in (first, rest) for seed in self.seeds for arm in arms]

    def cell(self, arm: str, seed: int, num_rounds: int) -> Cell:
        settings = {
            "arm": arm,
            "seed": seed,
            "num_nodes": self.num_nodes,
            "num_rounds": num_rounds,
            "mix": self.mix,
            "base": self.base,
            "groups_per_round": self.groups_per_round,
            "group_size": self.group_size,
            "held_out_tasks": self.held_out_tasks,
            # only for the digest: with other tasks it is another cell
            "tasks": [source.model_dump(mode="json", exclude_defaults=True) for source in SAPO_TASKS],
        }
        return Cell("sapo", f"{arm}, seed {seed}", settings)


def affordable_rounds(plan: SapoPlan, folder: Path, minutes: float, num_workers: int, say: Say) -> int:
    """Rounds per cell that fit into `minutes`; measured once and kept, so that a resumed experiment has the same cells."""
    kept = folder / "rounds.json"
    asked = {**asdict(plan), "minutes": minutes, "num_workers": num_workers}
    asked = json.loads(json.dumps(asked))
    if kept.exists() and (stored := read_json(kept, _MAX_KEPT_BYTES))["asked"] == asked:
        return int(stored["num_rounds"])
    say(f"measuring {_CALIBRATION_ROUNDS} rounds of {plan.num_nodes} nodes")
    trials = [plan.cell(SHARING, _CALIBRATION_SEED + worker, _CALIBRATION_ROUNDS) for worker in range(num_workers)]
    measured = compute(trials, CellStore(folder / "calibration"), num_workers, say)
    round_s = max(max(result["round_s"][1:]) for result in measured)
    other_s = max(result["other_s"] for result in measured)
    num_cells_each = -(-len(plan.arms) * len(plan.seeds) // num_workers)
    per_cell_s = _MARGIN * 60 * minutes / num_cells_each - other_s
    num_rounds = max(_MIN_ROUNDS, int(per_cell_s / round_s))
    say(f"{round_s / plan.num_nodes:.2f} s per node and round: {num_rounds} rounds per cell in {minutes:g} minutes")
    replace_file(kept, json.dumps({"asked": asked, "num_rounds": num_rounds, "round_s": round_s}), SHARED)
    return num_rounds


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over its seeds."""

    arm: str
    cumulative: Spread
    """Sum over rounds and nodes of mean reward, per seed."""
    at_equal_training: Spread
    """Mean reward until as many answers were trained on as the arm with the fewest has, per seed."""
    held_out_start: Spread
    held_out_end: Spread
    """Mean over sources and nodes."""
    late: Spread
    """Mean reward of sampled answers over the last quarter of the rounds."""
    answers_sampled: int
    """Of one seed."""
    answers_trained_on: Spread
    swarm_share: Spread
    """Groups of others among those trained on."""
    curve: tuple[float, ...]
    """Mean reward by round, over nodes and seeds."""


def summarize(results: Sequence[Result]) -> list[ArmSummary]:
    """Arms in the order of `ARMS`; only seeds that all arms have count."""
    arms = in_order(results)
    by_cell = {(result["arm"], result["seed"]): result for result in results}
    seeds = [seed for seed in sorted({seed for _, seed in by_cell}) if all((arm, seed) in by_cell for arm in arms)]
    fewest = {seed: min(sum(by_cell[arm, seed]["answers_trained_on"]) for arm in arms) for seed in seeds}
    return [_summary(arm, [by_cell[arm, seed] for seed in seeds], [fewest[seed] for seed in seeds]) for arm in arms]


def figures(summaries: Sequence[ArmSummary]) -> dict[str, Any]:
    """What a program reads: ratios seed by seed, then all arms."""
    by_name = {summary.arm: summary for summary in summaries}
    found: dict[str, Any] = {}
    for key, other in (("ratio_sharing", CONTROL), ("ratio_published", PUBLISHED)):
        both = SHARING in by_name and other in by_name
        ratio = by_name[SHARING].cumulative.over(by_name[other].cumulative) if both else None
        equal = by_name[SHARING].at_equal_training.over(by_name[other].at_equal_training) if both else None
        found[key] = None if ratio is None else round(ratio.mean, 4)
        found[f"{key}_std"] = None if ratio is None else round(ratio.std, 4)
        found[f"{key}_at_equal_training"] = None if equal is None else round(equal.mean, 4)
        found[f"{key}_at_equal_training_std"] = None if equal is None else round(equal.std, 4)
    found["arms"] = {
        summary.arm: {
            "cumulative_reward": summary.cumulative.rounded(),
            "reward_at_equal_training": summary.at_equal_training.rounded(),
            "held_out": summary.held_out_end.rounded(),
            "late_reward": summary.late.rounded(),
            "answers_trained_on": summary.answers_trained_on.rounded(),
        }
        for summary in summaries
    }
    return found


def reward_at_equal_training(rewards: Sequence[float], trained_on: Sequence[int], until: int) -> float:
    """Mean of the step function reward(answers trained on) over [0, until).

    `rewards[r]` is earned by the policy as it was before the step of round r, which trained on `trained_on[r]` answers.
    """
    total, done = 0.0, 0
    for reward, count in zip(rewards, trained_on, strict=True):
        step = min(count, until - done)
        total += reward * step
        done += step
    return total / done if done else 0.0


def mean_rewards(result: Result) -> list[float]:
    """Mean over nodes, round by round."""
    return [sum(row) / len(row) for row in result["rewards"]]


def in_order(results: Sequence[Result]) -> list[str]:
    """Names of the arms that there are results of."""
    found = {result["arm"] for result in results}
    return [name for name in ARMS if name in found]


def _summary(arm: str, results: Sequence[Result], fewest: Sequence[int]) -> ArmSummary:
    curves = [mean_rewards(result) for result in results]
    late = max(1, len(curves[0]) // 4) if curves else 1
    trained = [sum(result["answers_trained_on"]) for result in results]
    return ArmSummary(
        arm=arm,
        cumulative=Spread.of(sum(sum(row) for row in result["rewards"]) for result in results),
        at_equal_training=Spread.of(
            reward_at_equal_training(curve, result["answers_trained_on"], until)
            for curve, result, until in zip(curves, results, fewest, strict=True)
        ),
        held_out_start=Spread.of(_mean(result["held_out_start"]) for result in results),
        held_out_end=Spread.of(_mean(result["held_out_end"]) for result in results),
        late=Spread.of(sum(curve[-late:]) / late for curve in curves),
        answers_sampled=sum(results[0]["answers_sampled"]) if results else 0,
        answers_trained_on=Spread.of(trained),
        swarm_share=Spread.of(
            result["swarm_groups"] * result["group_size"] / max(count, 1)
            for result, count in zip(results, trained, strict=True)
        ),
        curve=tuple(sum(column) / len(column) for column in zip(*curves, strict=True)),
    )


def _mean(by_source: Mapping[str, float]) -> float:
    return sum(by_source.values()) / len(by_source) if by_source else 0.0
