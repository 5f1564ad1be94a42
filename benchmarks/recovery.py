"""How long a pipelined policy stands still when a machine dies: real processes, one killed at random every 30 seconds.

    python benchmarks/recovery.py            six stages and a spare, ten losses, five minutes
    python benchmarks/recovery.py --quick    three stages and a spare, two losses, under a minute on an idle machine of two cores
    python benchmarks/recovery.py --freeze   SIGSTOP in place of SIGKILL: the machine falls silent and its connections stay

Killed machines come back as spares after the next step, as a person would restart them. Times run from the kill to the next
completed step of the driver, sampling of its round included; `rebuilding` is the part from the moment the
driver notices. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformers

from swarm.adapters.load_pretrained import quiet_libraries
from swarm.config import PolicySection
from swarm.policy.base_folder import BUNDLED_FOLDER
from tests.e2e.pipeline_processes import PipelineProcesses, pipeline_processes

SETTINGS = {
    "rollouts": {"groups_per_round": 2, "group_size": 4, "max_new_tokens": 6},
    "sharing": {"own_groups": 2, "swarm_groups": 0, "publish": False},
    "training": {"filter_groups": False, "mask_truncated": False, "correction": "none"},
    "checkpoint": {"interval_rounds": 1000},
}
PAUSE_S = 30.0
STARTUP_S = 600.0


def deeper_base(folder: Path, num_layers: int) -> Path:
    """The bundled policy with as many layers as there are stages: some left out, or random ones on top."""
    with quiet_libraries():
        model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER, num_hidden_layers=num_layers)
        model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(BUNDLED_FOLDER).save_pretrained(folder)
    return folder


def lose_one(machines: PipelineProcesses, rng: random.Random, freeze: bool) -> tuple[float, int]:
    """(seconds from the kill of a random stage to the next completed step, steps that were lost)"""
    skipped = num_skipped(machines)
    victim = rng.choice(machines.holders())
    took_s, _ = machines.lose(victim, freeze=freeze)
    victim.end()
    victim.start()
    return took_s, num_skipped(machines) - skipped


def num_skipped(machines: PipelineProcesses) -> int:
    """Rounds so far whose step was lost with a stage."""
    return sum("stage" in str(row.get("train/skip_reason")) for row in machines.driver.rounds)


def first_and_last_reward(machines: PipelineProcesses) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter of rounds."""
    rewards = [row["rollout/reward_mean"] for row in machines.driver.rounds]
    quarter = max(1, len(rewards) // 4)
    return statistics.mean(rewards[:quarter]), statistics.mean(rewards[-quarter:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backend", choices=("libp2p", "hivemind"), default="libp2p")
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    num_stages, num_losses, pause_s = (2, 2, 0.0) if arguments.quick else (5, 10, PAUSE_S)  # the driver holds one more
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = str(deeper_base(folder / "base", num_stages + 1))
        pipeline = {"copy_interval_steps": 1, "spares": 1}
        policy = PolicySection(base=base, max_prompt_tokens=256).model_dump(
            mode="json", exclude_none=True, exclude={"pipeline"}
        )
        layers = [f"{number}:{number + 1}" for number in range(num_stages)]
        with pipeline_processes(
            folder,
            num_stages + 1,
            backend=arguments.backend,
            layers=layers,
            pipeline=pipeline,
            policy=policy,
            **SETTINGS,
        ) as machines:
            machines.step_after(1, deadline_s=STARTUP_S)
            times_s, steps_lost = [], 0
            for number in range(num_losses):
                time.sleep(max(0.0, pause_s - (times_s[-1] if times_s else 0.0)) if number else 0.0)
                took_s, lost = lose_one(machines, rng, arguments.freeze)
                times_s.append(took_s)
                steps_lost += lost
                print(f"loss {number + 1}: {took_s:.1f} s to the next step, {lost} steps lost", flush=True)
            own_s = machines.recoveries_s()
            rewards = first_and_last_reward(machines)
    sorted_s = sorted(times_s)
    result = {
        "recovery_median_s": round(statistics.median(sorted_s), 2),
        "recovery_p95_s": round(sorted_s[min(len(sorted_s) - 1, int(0.95 * len(sorted_s)))], 2),
        "steps_lost": steps_lost,
        "rebuilding_median_s": round(statistics.median(own_s), 2),
        "reward_before_and_after": [round(value, 3) for value in rewards],
        "losses": num_losses,
        "stages": num_stages + 1,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
