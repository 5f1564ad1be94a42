"""Measures whether different models help each other: two architectures with different tokenizers, in one swarm and alone.

They exchange text only: answers are encoded again, and the likelihood floor leaves out what the reader would not write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.experiments.cells import Cell, Result
from swarm.report.tables import Curves, Spread, Table, smooth

BUNDLED, SECOND = "Llama, characters", "Qwen2, byte pairs"
MODELS = (BUNDLED, SECOND)
SILOS, MIXED = "silo", "mixed"
ARMS = (SILOS, MIXED)
_WINDOW_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class HeterogeneousPlan:
    """What to run."""

    second_base: Path
    """Folder of the second policy, made by `second_policy_cell`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    num_rounds: int = 60
    nodes_per_model: int = 1
    """With one of each, every group of others comes from the other model."""
    groups_per_round: int = 8
    group_size: int = 8
    held_out_tasks: int = 32
    """Per source."""

    def cells(self) -> list[Cell]:
        """Seed after seed, so that an experiment cut short has whole seeds."""
        return [self._cell(arm, seed) for seed in self.seeds for arm in ARMS]

    def _cell(self, arm: str, seed: int) -> Cell:
        settings = {
            "arm": arm,
            "seed": seed,
            "second_base": str(self.second_base),
            "num_rounds": self.num_rounds,
            "nodes_per_model": self.nodes_per_model,
            "groups_per_round": self.groups_per_round,
            "group_size": self.group_size,
            "held_out_tasks": self.held_out_tasks,
        }
        return Cell("heterogeneous", f"{arm}, seed {seed}", settings)


def second_policy_cell(folder: Path, learn_steps: int) -> Cell:
    """Trains the second policy into `folder`, once."""
    settings = {
        "folder": str(folder.resolve()),
        "seed": 0,
        "learn_steps": learn_steps,
        "blur_steps": max(1, learn_steps // 4),
        "batch_size": 48,
        "examples": max(64, 16 * learn_steps),
        "measured_tasks": 32 if learn_steps > 50 else 2,
    }
    return Cell("second_policy", "second policy", settings)


def model_table(results: Sequence[Result]) -> Table:
    """Every model as a silo and in the mixed swarm; mean ± standard deviation over seeds, gains paired by seed."""
    rows = []
    for model in MODELS:
        start = _held_out(results, SILOS, model, "held_out_start")
        for arm in ARMS:
            rewards, ends = _cumulative(results, arm, model), _held_out(results, arm, model, "held_out_end")
            gain = rewards.over(_cumulative(results, SILOS, model)).text(3) if arm != SILOS else ""
            rows.append([f"{model}: {arm}", rewards.text(1), gain, start.text(3), ends.text(3)])
    headers = ["model", "rewards", "× silo", "start", "held-out end"]
    return Table("Unlike models", headers, rows)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """What a program reads."""
    found: dict[str, Any] = {}
    for name, model in (("bundled", BUNDLED), ("second", SECOND)):
        ratio = _cumulative(results, MIXED, model).over(_cumulative(results, SILOS, model))
        found[f"ratio_{name}"] = round(ratio.mean, 4)
        found[f"ratio_{name}_std"] = round(ratio.std, 4)
        for arm, key in ((SILOS, "silo"), (MIXED, "mixed")):
            found[f"held_out_{name}_{key}"] = _held_out(results, arm, model, "held_out_end").rounded()
    return found


def curves(results: Sequence[Result]) -> list[Curves]:
    """Mean reward over rounds, one picture per model."""
    drawn = []
    for model in MODELS:
        lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for arm in ARMS:
            rows = [result["rewards"][model] for result in results if result["arm"] == arm]
            mean = [sum(column) / len(column) for column in zip(*rows, strict=True)]
            lines[arm] = (list(range(1, len(mean) + 1)), smooth(mean, _WINDOW_ROUNDS))
        drawn.append(Curves(model, "round", f"mean reward, {_WINDOW_ROUNDS} rounds", lines))
    return drawn


def _cumulative(results: Sequence[Result], arm: str, model: str) -> Spread:
    return Spread.of(sum(result["rewards"][model]) for result in results if result["arm"] == arm)


def _held_out(results: Sequence[Result], arm: str, model: str, when: str) -> Spread:
    return Spread.of(result[when][model] for result in results if result["arm"] == arm)
