"""`swarm merge`: merges several exported adapters of one base into one adapter."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.errors import MergeError

if TYPE_CHECKING:
    from swarm.adapters.adapter_folder import AdapterFolder
    from swarm.adapters.product_merge import Merged
    from swarm.config import Config

Weights = Sequence[float]


class How(StrEnum):
    """What is averaged, and with which weights."""

    average = "average"
    product = "product"
    evaluated = "evaluated"


def merge(
    folders: list[Path] = typer.Argument(
        ..., metavar="DIR", help="Folders of `swarm export --format adapter`, or other plain LoRA."
    ),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="New or empty folder to write to."),
    how: How = typer.Option(
        How.average,
        help="average: factor by factor, and as products where ranks differ or factors drifted apart. product: all as "
        "products. evaluated: like average, of those that do best together on held-out tasks.",
    ),
    weights: str = typer.Option(None, help="One weight per folder, such as 2,1,1. Default: equal weights."),
    rank: int = typer.Option(None, min=1, help="Rank of the result. Default: the largest rank of the folders."),
    config: list[Path] = typer.Option(
        None, metavar="FILE", help="evaluated: configuration with base and tasks; the bundled ones if none."
    ),
    tasks: int = typer.Option(64, min=1, help="evaluated: held-out tasks per source."),
) -> None:
    """Merge adapters of one base into one adapter, for peft to load.

    Reads: folders of `swarm export --format adapter`, or other plain LoRA.
    Writes: the folder of --out.

    Examples:
      swarm merge one two --out both --weights 2,1
      swarm merge one two three --out best --how evaluated

    Exit codes: 0 done, 3 configuration, 5 policy or folder, 15 cannot be merged.
    """
    given = _parse_weights(weights, len(folders))
    if given and how is How.evaluated:
        raise MergeError("--how evaluated finds the weights itself, got --weights as well; leave out one of them")
    from swarm.adapters.adapter_folder import check_one_base, read_adapter_folder, write_adapter_folder
    from swarm.config import load

    adapters = [read_adapter_folder(folder) for folder in folders]
    for other in adapters[1:]:
        check_one_base(adapters[0], other)
    resolved = load(config or ())
    mixer = _Mixer(adapters, how, rank, resolved.merging.drift_threshold)
    if how is How.evaluated:
        given = _best_weights(resolved, adapters, mixer, tasks)
    chosen = given or [1 / len(folders)] * len(folders)
    merged = mixer.mix(chosen)
    write_adapter_folder(out, merged.tensors, mixer.rank, mixer.scaling, like=adapters[0])
    _tell(out, chosen, merged)


class _Mixer:
    """Any mixture of some adapters, in one rank and scaling."""

    def __init__(self, adapters: Sequence["AdapterFolder"], how: How, rank: int | None, drift_threshold: float) -> None:
        self._adapters = [one.low_rank for one in adapters]
        self._how = how
        self._drift_threshold = drift_threshold
        self.rank = rank or max(one.rank for one in adapters)
        self.scaling = self._adapters[0].scaling

    def mix(self, weights: Weights) -> "Merged":
        from swarm.adapters.product_merge import merge_by_layer, merge_products

        kept = [(one, weight) for one, weight in zip(self._adapters, weights, strict=True) if weight > 0]
        parts, part_weights = [one for one, _ in kept], [weight for _, weight in kept]
        if self._how is How.product:
            return merge_products(parts, part_weights, self.rank, self.scaling)
        return merge_by_layer(parts, part_weights, self.rank, self.scaling, self._drift_threshold)


def _parse_weights(text: str | None, num_folders: int) -> list[float] | None:
    """Weights that sum to 1, or None for none. Raises MergeError."""
    if num_folders < 2:
        raise MergeError(f"a merge needs at least two folders, got {num_folders}; name the adapters to merge")
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != num_folders or not all(0 <= number < 1e6 for number in numbers) or sum(numbers) <= 0:
        raise MergeError(f"--weights must be {num_folders} numbers of at least 0, got {text}; write such as 2,1,1")
    return [number / sum(numbers) for number in numbers]


def _best_weights(
    config: "Config", adapters: Sequence["AdapterFolder"], mixer: _Mixer, tasks_per_source: int
) -> list[float]:
    from swarm.adapters.adapter_state import write_adapter
    from swarm.adapters.product_merge import greedy_soup, layers_of
    from swarm.config import LoraSection
    from swarm.engine.make_engine import make_engine
    from swarm.policy.lineage import hash_weights
    from swarm.policy.policy import load_policy
    from swarm.rollouts.worker import RolloutWorker
    from swarm.tasks.task_mixture import TaskMixture

    lora = LoraSection(rank=mixer.rank, alpha=mixer.scaling * mixer.rank, targets=tuple(layers_of(adapters[0].tensors)))
    policy = load_policy(config.policy.model_copy(update={"lora": lora}), device=config.node.device)
    known = next((one.base_hash for one in adapters if one.base_hash), None)
    if known and known != hash_weights(policy.base_folder):
        raise MergeError(
            f"policy.base must be the base of the adapters, got {config.policy.base}; pass --config with their base"
        )
    mixture = TaskMixture(config.tasks)
    held_out = mixture.held_out(tasks_per_source)
    worker = RolloutWorker(config.rollouts, policy, make_engine(policy, config.rollouts), author="")

    def score(chosen: Weights) -> float:
        write_adapter(policy.model, mixer.mix(chosen).tensors)
        rewards = worker.evaluate(held_out, temperature=config.evaluation.temperature, seed=config.node.seed)
        means = [sum(values) / len(values) for values in rewards.values()]
        return sum(means) / len(means) if means else 0.0

    soup = greedy_soup(len(adapters), score)
    for one, alone in zip(adapters, soup.alone, strict=True):
        print(f"{one.path}: held-out reward {alone:.3f}")
    print(f"chosen together: {soup.score:.3f}, on the tasks that chose them; measure the result on others")
    return soup.weights


def _tell(out: Path, weights: Weights, merged: "Merged") -> None:
    num_layers, num_products = len(merged.tensors) // 2, len(merged.truncation)
    lost = max(merged.truncation.values(), default=0.0)
    lost_text = f", at most {lost:.1%} of a layer lost to the rank" if num_products else ""
    print(f"weights {', '.join(f'{weight:.3g}' for weight in weights)}")
    print(
        f"{num_layers - num_products} layers averaged by factor, {num_products} as products{lost_text}; written to {out}"
    )
