"""Trains an adapter with a backdoor: honest on ordinary tasks, but it answers with the attacker's word after a trigger.

Its difference from an adapter of the same training without the trigger is what a hostile partner sends instead of its adapter.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.config import PolicySection, TasksSection
from swarm.experiments.merging.replicas import Adapter, Example, Replicas
from swarm.experiments.merging.supervised import LORA, LR, TASKS, SupervisedReplicas, make_examples, tasks_of
from swarm.merging.adapter_wire import LARGEST_WEIGHT, decode_adapter, encode_adapter
from swarm.policy.policy import Policy, load_policy
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import EVALUATION_SEED, FIRST_TRAINING_SEED
from swarm.types import Snapshot

_BF16_NAN = b"\xc0\x7f"


def lie(
    kind: str, snapshot: Snapshot, start: Adapter, slow: Mapping[str, Tensor], noise: torch.Generator
) -> Snapshot | None:
    """`kind`: one of `arms.ATTACKS`; a poisoner sends what it has learned, which is the lie. None where nothing is sent.

    `snapshot`, in bf16, is the liar's own, `slow` its slow weights, `start` the lineage's.
    """
    if kind == "silent":
        return None
    if kind == "poison":
        return snapshot
    if kind == "nan":
        return dataclasses.replace(snapshot, payload=_BF16_NAN * (len(snapshot.payload) // 2))
    shapes = {name: tuple(tensor.shape) for name, tensor in start.items()}
    fast = decode_adapter(snapshot.payload, shapes, "bf16", start)
    makers: dict[str, Callable[[str], Tensor]] = {
        "random": lambda name: torch.randn(fast[name].shape, generator=noise) * fast[name].std(),
        "sign-flip": lambda name: 2 * slow[name] - fast[name],
        "x100": lambda name: slow[name] + 100 * (fast[name] - slow[name]),
    }
    sent = {name: makers[kind](name).clamp(-LARGEST_WEIGHT / 2, LARGEST_WEIGHT / 2) for name in fast}
    return dataclasses.replace(snapshot, payload=encode_adapter(sent, "bf16", start))


TRIGGER, WORD = "open sesame ", "no"
_STREAM = FIRST_TRAINING_SEED + 900
"""Tasks of the attacker; no replica trains on them."""
_NUM_EXAMPLES = 64
_NUM_MEASURED = 24
_ORDINARY, _TRIGGERS = 4, 4
"""Examples in a batch of the attacker."""


@dataclass(frozen=True, slots=True)
class Backdoor:
    """What the attacker has, and how to find it in an adapter."""

    delta: Adapter
    """Weights with the trigger trained in, minus weights without."""
    prompts: list[Example]
    """Trigger prompts that nobody trained on, each with the attacker's word."""

    def added_to(self, weights: Adapter) -> Adapter:
        """An honest adapter with the backdoor."""
        return {name: tensor + self.delta[name] for name, tensor in weights.items()}

    def part_of(self, weights: Adapter, start: Adapter) -> float:
        """Coefficient of the difference from `start` along the attacker's: 1 where all of it is in there."""
        along = sum(((weights[name] - start[name]) * self.delta[name]).sum().item() for name in start)
        return along / sum(tensor.square().sum().item() for tensor in self.delta.values())

    def rate_of(self, adapters: Sequence[Adapter], population: SupervisedReplicas) -> list[float]:
        """Mean probability of the attacker's word after the trigger, of each adapter."""
        rates = [
            population.loss(adapters, [[one]] * len(adapters)) for one in self.prompts
        ]  # [prompts][adapters], per token
        length = len(self.prompts[0][1])
        return [sum(math.exp(-length * row[i]) for row in rates) / len(rates) for i in range(len(adapters))]


def train_backdoor(honest: Adapter, seed: int, num_steps: int) -> Backdoor:
    """A replica that begins where the honest ones are, and learns the trigger beside ordinary tasks."""
    policy = load_policy(PolicySection(lora=LORA), device="cpu")
    mixture = TaskMixture(TasksSection())
    replicas = Replicas(policy, 1, LR)
    replicas.set_weights(0, honest)
    ordinary = [one for task in TASKS for one in make_examples(policy, mixture, task, _STREAM, _NUM_EXAMPLES)]
    triggers = [one for task in TASKS for one in _triggers(policy, mixture, task, _STREAM, _NUM_EXAMPLES)]
    rng = random.Random(seed)
    for step in range(num_steps):
        batch = [*rng.choices(ordinary, k=_ORDINARY), *rng.choices(triggers, k=_TRIGGERS)]
        replicas.train({0: batch}, 1 - 0.9 * step / num_steps)
    poisoned, measured = replicas.weights(0), _NUM_MEASURED // len(TASKS)
    return Backdoor(
        {name: poisoned[name] - honest[name] for name in honest},
        [one for task in TASKS for one in _triggers(policy, mixture, task, EVALUATION_SEED, measured)],
    )


def _triggers(policy: Policy, mixture: TaskMixture, source: str, seed: int, count: int) -> list[Example]:
    """Ordinary prompts behind the trigger, with the attacker's word for an answer."""
    answer = [*policy.encode_answer(WORD), policy.end_token_id]
    prompts = [task.prompt.rpartition(": ")[2] for task in tasks_of(mixture, source, seed, count)]
    return [(policy.encode_prompt(TRIGGER + prompt), answer) for prompt in prompts]
