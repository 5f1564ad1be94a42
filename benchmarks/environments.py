"""What a slow environment costs: episodes whose environment takes 50 ms per step, beside the same ones without a wait.

    python benchmarks/environments.py            three sizes of a round, five turns each; about four minutes
    python benchmarks/environments.py --quick    the size of a default round, three turns; under a minute

The bundled reasoning policy answers three times to scripted replies, so both sides sample the very same tokens: the seed decides
them, not the time. Environments step in threads beside sampling. The wait alone would take 150 ms for each episode; the lower
bound of a round is three waits, one after the other. The last line of the output is one JSON object; `ratio_env` is answers per
second with the wait over those without it, median over the turns.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial

import torch

from swarm.adapters.load_pretrained import quiet_libraries
from swarm.config import PolicySection, RolloutsSection
from swarm.engine.make_engine import make_engine
from swarm.policy.policy import load_policy
from swarm.rollouts.worker import RolloutWorker
from swarm.types import PromptContext, Step, Task, TaskRef

_STEP_S = 0.05
_TURNS = 3
_SYSTEM = "Work in steps inside <think></think>, then write the result inside <answer></answer>."


class Waiting:
    """An environment that asks for more until its turns are over."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._num_left = _TURNS

    def step(self, answer: str) -> Step:
        time.sleep(self._wait_s)  # the work of an environment, which is what this measures
        self._num_left -= 1
        return Step("What is 27 * 31?", 0.0, is_done=not self._num_left)


def _tasks(count: int, wait_s: float) -> list[Task]:
    ref = TaskRef("waiting", "00" * 8, 20, 0)
    task = Task(ref, "What is 48 * 53?", lambda text: 0.0, context=PromptContext(_SYSTEM), max_turns=_TURNS)
    return [
        replace(
            task, ref=replace(ref, index=index), begin=partial(Waiting, wait_s), prompt=f"What is {30 + index} * 53?"
        )
        for index in range(count)
    ]


def main() -> None:
    """Measure, print the table, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, three turns")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for tensor work (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = RolloutsSection(group_size=8, max_new_tokens=512)
    with quiet_libraries():
        policy = load_policy(PolicySection(base="bundled-reasoning"), device="cpu")
    worker = RolloutWorker(config, policy, make_engine(policy, config), author="")
    worker.rollout(_tasks(1, 0.0), seed=0)
    figures: dict[str, float] = {}
    for num_groups in (8,) if options.quick else (2, 8, 32):
        ratios: list[float] = []
        for turn in range(3 if options.quick else 5):
            rates: dict[float, float] = {}
            for wait_s in (0.0, _STEP_S):
                started = time.perf_counter()
                batch = worker.rollout(_tasks(num_groups, wait_s), seed=turn)
                duration = time.perf_counter() - started
                num_answers = sum(len(one.turns) + 1 for group in batch.groups for one in group.rollouts)
                rates[wait_s] = num_answers / duration
                print(
                    f"{num_groups:3} groups of 8, {1000 * wait_s:2.0f} ms: {num_answers} answers, {batch.num_tokens} tokens in "
                    f"{duration:.2f} s, {rates[wait_s]:.1f} answers/s",
                    flush=True,
                )
            ratios.append(rates[_STEP_S] / rates[0.0])
        name = "ratio_env" if num_groups == 8 else f"ratio_env_{num_groups}_groups"
        figures[name] = round(statistics.median(ratios), 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
