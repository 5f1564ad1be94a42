"""The canary checks that the engine samples from the weights that are trained, by one short answer after every update.

The engine scores the answer as it decodes, token by token over its cache; the trainer scores it in one pass without a cache.
A difference means that training corrects for a distribution that nothing was sampled from: outdated or merged weights,
another precision, a wrong mask or position.
"""

import torch

from swarm.engine.engine import Engine
from swarm.errors import TrainingError
from swarm.policy.policy import Policy, TextPolicy

PROMPT = "What is 2 + 3?"
ANSWER = "5"


class Canary:
    """Compares engine and trainer on one fixed answer."""

    def __init__(self, policy: TextPolicy, engine: Engine, tolerance: float) -> None:
        self._policy = policy
        self._engine = engine
        self._prompt = policy.encode_prompt(PROMPT)
        self._answer = [*policy.encode_answer(ANSWER), policy.end_token_id]
        self._tolerance = max(tolerance, rounding_floor(policy))

    def check(self) -> float:
        """Return the largest difference of the log-probs, in nats. Raises TrainingError beyond the tolerance and for NaN."""
        sampled = torch.tensor(self._engine.score(self._prompt, self._answer))
        with torch.no_grad():
            result = self._policy.token_logprobs([(self._prompt, self._answer)])
        difference = (sampled - result.logprobs[0].cpu()).abs().max().item()  # NaN if any is NaN
        allowed = self._tolerance if difference <= self._tolerance else max(self._tolerance, self._resolution())
        if not difference <= allowed:
            raise TrainingError(
                f"engine and trainer must agree on the canary answer within {allowed:.3g} nats, got "
                f"{difference:.3g} at policy version {self._policy.version}: the engine samples from other weights "
                "than are trained; restart the node, and raise training.canary_tolerance only for reduced precision"
            )
        return difference

    def _resolution(self) -> float:
        """Two steps of the policy's number format at its largest logit here: in bfloat16, .25 nats where that is 16."""
        if not isinstance(self._policy, Policy) or self._policy.dtype == torch.float32:
            return 0.0
        token_ids = torch.tensor([[*self._prompt, *self._answer]], device=self._policy.device)
        with torch.no_grad():
            logits: torch.Tensor = self._policy.model(input_ids=token_ids).logits
        return 2 * torch.finfo(self._policy.dtype).eps * logits.abs().max().item()


def rounding_floor(policy: TextPolicy) -> float:
    """Largest difference of two correct computations, in nats: 8- and 16-bit activations round differently by shape."""
    pipeline = policy.config.pipeline
    is_rounded_on_the_way = pipeline.is_on and pipeline.precision != "fp32"
    is_reduced = policy.dtype != torch.float32 or policy.config.quantization == "8bit"
    return 0.1 if is_reduced or is_rounded_on_the_way else 0.0
