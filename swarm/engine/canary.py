"""The canary checks that the engine samples from the weights that are trained, by one short answer after every update.

The engine scores the answer as it decodes, token by token over its cache; the trainer scores it in one pass without a cache.
A difference means that training corrects for a distribution that nothing was sampled from: outdated or merged weights,
another precision, a wrong mask or position.
"""

import torch

from swarm.engine.engine import Engine
from swarm.errors import TrainingError
from swarm.policy.policy import TextPolicy

PROMPT = "What is 2 + 3?"
ANSWER = "5"


class Canary:
    """Compares engine and trainer on one fixed answer."""

    def __init__(self, policy: TextPolicy, engine: Engine, tolerance: float) -> None:
        self._policy = policy
        self._engine = engine
        self._prompt = policy.encode_prompt(PROMPT)
        self._answer = [*policy.encode_answer(ANSWER), policy.eos_token_ids[0]]
        self._tolerance = max(tolerance, rounding_floor(policy))

    def check(self) -> float:
        """Return the largest difference of the log-probs, in nats. Raises TrainingError beyond the tolerance and for NaN."""
        sampled = torch.tensor(self._engine.score(self._prompt, self._answer))
        with torch.no_grad():
            result = self._policy.token_logprobs([(self._prompt, self._answer)])
        difference = (sampled - result.logprobs[0].cpu()).abs().max().item()  # NaN if any is NaN
        if not difference <= self._tolerance:
            raise TrainingError(
                f"engine and trainer must agree on the canary answer within {self._tolerance:g} nats, got "
                f"{difference:.3g} at policy version {self._policy.version}: the engine samples from other weights "
                "than are trained; restart the node, and raise training.canary_tolerance only for reduced precision"
            )
        return difference


def rounding_floor(policy: TextPolicy) -> float:
    """Largest difference of two correct computations, in nats: 8- and 16-bit activations round differently by shape."""
    pipeline = policy.config.pipeline
    is_rounded_on_the_way = pipeline.is_on and pipeline.precision != "fp32"
    is_reduced = policy.dtype != torch.float32 or policy.config.quantization == "8bit"
    return 0.1 if is_reduced or is_rounded_on_the_way else 0.0
