"""What a lost stage costs, by the way its adapter is rebuilt: the bundled policy in three stages, the middle one lost.

    python benchmarks/pipeline_recovery.py              three seeds, some minutes
    python benchmarks/pipeline_recovery.py --quick      one seed

The adapter learns a made-up task (spell a word backward, each letter moved on by three) by plain maximum likelihood for 60
steps. Then the stage is lost, and each strategy goes on from the very same state with the very same batches. Held-out loss in
nats per token, right after and 1, 5 and 15 steps later; `none` loses nothing. The last line is one JSON object.
"""

import argparse
import asyncio
import copy
import json
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from swarm.config import LoraSection
from swarm.pipeline.commands import StageSettings
from swarm.pipeline.driver.pipeline_policy import LossOf, PipelineModel
from swarm.pipeline.driver.recovery import NeighbourCopy, Recovery, Strategy, rebuild_stage, take_copies
from swarm.pipeline.driver.stage_group import StageGroup, StageGroupSettings
from swarm.pipeline.model_shape import stage_parts
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.stage.stage_model import load_stage
from swarm.pipeline.stage_link import InProcessLink
from swarm.policy.base_folder import BUNDLED_FOLDER
from swarm.policy.base_model import load_tokenizer
from swarm.policy.logprobs import TokenLogprobs, TokenSequence

SIZES, LOST = (1, 1, 2), 1
NUM_STEPS, COPY_AGE = 60, 10
LATER = (1, 5, 15)
SOURCES: dict[Strategy, tuple[int, ...]] = {"neighbour_copy": (LOST + 1,), "average": (LOST - 1, LOST + 1), "base": ()}
Parts = list[list[TokenSequence]]


class Task:
    """Batches of two micro-batches of 24 words."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(BUNDLED_FOLDER)

    def parts(self, rng: random.Random) -> Parts:
        return [[self._pair(rng) for _ in range(24)] for _ in range(2)]

    def _pair(self, rng: random.Random) -> TokenSequence:
        word = "".join(rng.choice("abcdefgh") for _ in range(rng.randint(4, 7)))
        answer = "".join(chr((ord(letter) - 97 + 3) % 8 + 97) for letter in reversed(word))
        prompt_ids = self._tokenizer(f"Rot {word}: ").input_ids
        return prompt_ids, [*self._tokenizer(answer).input_ids, self._tokenizer.eos_token_id]


@asynccontextmanager
async def open_stage_group(states: Sequence[Any] = ()) -> AsyncIterator[tuple[StageGroup, PipelineModel]]:
    """(stage group, model) with fresh stages, or stages that continue from `states`."""
    stages = [new_stage(index) for index in range(len(SIZES))]
    for stage, state in zip(stages, states, strict=False):
        stage.restore(*copy.deepcopy(state))
    stage_group = StageGroup([InProcessLink(stage) for stage in stages], StageGroupSettings())
    await stage_group.start()
    try:
        yield stage_group, PipelineModel(stage_group, pad_token_id=0)
    finally:
        for link in stage_group.links:
            assert isinstance(link, InProcessLink)
            link.close()


def new_stage(index: int) -> Stage:
    lora = LoraSection(rank=8, alpha=16.0)
    part = stage_parts(SIZES)[index]
    model = load_stage(BUNDLED_FOLDER, part, lora=lora, device=torch.device("cpu"), dtype=torch.float32)
    return Stage(model, StageSettings())


async def train(stage_group: StageGroup, policy: PipelineModel, task: Task, rng: random.Random, num_steps: int) -> None:
    for _ in range(num_steps):
        parts = task.parts(rng)
        await policy.accumulate(parts, mean_loss(parts))
        await stage_group.commit(lr=3e-3, max_grad_norm=1.0)


def mean_loss(parts: Parts) -> LossOf:
    num_tokens = sum(len(answer) for part in parts for _, answer in part)

    def loss_of(_: int, result: TokenLogprobs) -> Tensor:
        return -(result.logprobs * result.mask).sum() / num_tokens

    return loss_of


async def held_out_loss(policy: PipelineModel, task: Task) -> float:
    parts = [part for seed in range(3) for part in task.parts(random.Random(10**6 + seed))]
    results = await policy.token_logprobs(parts)
    total = sum((result.logprobs * result.mask).sum().item() for result in results)
    return -total / sum(result.mask.sum().item() for result in results)


async def after_loss(
    strategy: Strategy | Literal["none"],
    states: Sequence[Any],
    norms: tuple[float, ...],
    copies: tuple[NeighbourCopy, ...],
    task: Task,
) -> list[float]:
    """Held-out losses once the stage is rebuilt by `strategy`."""
    async with open_stage_group(states) as (stage_group, policy):
        stage_group.stage_norms = norms
        if strategy != "none":
            link = InProcessLink(new_stage(LOST))
            await rebuild_stage(stage_group, Recovery(LOST, strategy, SOURCES[strategy], "chosen"), link, copies)
        losses, done, rng = [await held_out_loss(policy, task)], 0, random.Random(77)
        for num_steps in LATER:
            await train(stage_group, policy, task, rng, num_steps - done)
            done = num_steps
            losses.append(await held_out_loss(policy, task))
        return losses


async def one_seed(seed: int, task: Task) -> dict[str, list[float]]:
    async with open_stage_group() as (stage_group, policy):
        rng = random.Random(seed)
        await train(stage_group, policy, task, rng, NUM_STEPS - COPY_AGE)
        copies = await take_copies(stage_group)
        await train(stage_group, policy, task, rng, COPY_AGE)
        states, norms = [await link.state() for link in stage_group.links], stage_group.stage_norms
    found = {"none": await after_loss("none", states, norms, copies, task)}
    return found | {strategy: await after_loss(strategy, states, norms, copies, task) for strategy in SOURCES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    torch.set_num_threads(1)
    task = Task()
    runs = [asyncio.run(one_seed(seed, task)) for seed in range(1 if parser.parse_args().quick else 3)]
    print(f"{'strategy':16}" + "".join(f"{name:>12}" for name in ("at once", *(f"+{n} steps" for n in LATER))))
    figures: dict[str, float] = {}
    for strategy in runs[0]:
        means = [statistics.mean(column) for column in zip(*(run[strategy] for run in runs), strict=True)]
        print(f"{strategy:16}" + "".join(f"{mean:12.3f}" for mean in means))
        figures[f"loss_{strategy}"], figures[f"loss_{strategy}_later"] = round(means[0], 3), round(means[-1], 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
