"""Makes the policy of the sharing experiment: the bundled one after lessons in the nine tasks, with lowered confidence.

    python -m swarm.experiments.sapo.policy --out swarm/assets/sapo_policy

The bundled policy was made for other tasks. It gets one answer in twenty-five of these nine right, mostly by chance, which gives
no signal to learn from. So it gets what a base model has from its pre-training: some skill and little confidence. The recipe is
that of the bundled policy, started from its weights. The result is measured on held-out tasks and written beside the weights.
"""

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM

from swarm.adapters.load_pretrained import load_pretrained
from swarm.assets.recipe import make_tokenizer
from swarm.assets.schooling import Course, Effort, Phase, make, parse
from swarm.experiments.sapo.tasks import SAPO_TASKS
from swarm.policy.base_folder import BUNDLED_FOLDER

_BEYOND = {"bf": 0.0, "propositional_logic": 0.0}
"""Not taught: the answers of the one cannot be counted by so small a model, those of the other are not told."""

LEARN = Phase(
    name="learn",
    noise={},
    weights={**_BEYOND, "basic_arithmetic": 2.0, "decimal_arithmetic": 2.0, "fraction_simplification": 0.2},
    adam_lr=2e-3,
    muon_lr=0.01,
)
BLUR = Phase(
    name="blur",
    # As much as leaves the right answer the likeliest one; tasks with few different answers bear less.
    noise={
        "arc_1d": 0.75, "base_conversion": 0.75, "basic_arithmetic": 0.75, "decimal_arithmetic": 0.75,
        "calendar_arithmetic": 0.7, "fraction_simplification": 0.5, "binary_matrix": 0.5,
    },
    weights=_BEYOND,
    adam_lr=1e-3,
    muon_lr=0.006,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and save as the command line says."""
    options = parse(arguments, __doc__, Effort(600, 150, 32, 6_000, 64))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    base = load_pretrained(LlamaForCausalLM, BUNDLED_FOLDER)
    make(Course(SAPO_TASKS, LEARN, BLUR), base, make_tokenizer(), options)


if __name__ == "__main__":
    main()
