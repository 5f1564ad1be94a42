"""The canary raises when the engine samples from other weights than the trained ones."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from swarm.engine.canary import Canary
from swarm.engine.engine import Completion
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import TrainingError
from swarm.policy.policy import Policy
from tests.unit.tiny_models import ARCHITECTURES, perturb

MakePolicy = Callable[..., Policy]


class StaleEngine:
    """An engine that copied the weights when it was built."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights = {name: value.clone() for name, value in policy.model.state_dict().items()}

    held_bytes = 0
    answers_wait = False

    def generate(self, *_: Any, **__: Any) -> list[list[Completion]]:
        raise AssertionError("the canary only scores")

    def answer_bytes(self, num_tokens: int) -> int:
        raise AssertionError("the canary only scores")

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        trained = {name: value.clone() for name, value in self._policy.model.state_dict().items()}
        self._policy.model.load_state_dict(self._weights)
        logprobs = SlotEngine(self._policy, 4).score(prompt, answer)
        self._policy.model.load_state_dict(trained)
        return logprobs


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_engine_and_trainer_agree(make_policy: MakePolicy, name: str):
    policy = make_policy(name)
    canary = Canary(policy, SlotEngine(policy, 4), tolerance=1e-4)
    canary.check()
    perturb(policy)
    assert canary.check() <= 1e-4


def test_stale_weights_are_found(make_policy: MakePolicy):
    policy = make_policy()
    canary = Canary(policy, StaleEngine(policy), tolerance=1e-3)
    canary.check()
    perturb(policy, scale=0.01)
    with pytest.raises(TrainingError, match="samples from other weights than are trained"):
        canary.check()


def test_a_policy_without_finite_logprobs_is_found(make_policy: MakePolicy):
    policy = make_policy()
    canary = Canary(policy, SlotEngine(policy, 4), tolerance=1e-3)
    with torch.no_grad():
        next(p for n, p in policy.model.named_parameters() if "down_proj.lora_B" in n).fill_(float("nan"))
    with pytest.raises(TrainingError, match="got nan"):
        canary.check()


@pytest.mark.parametrize("settings", [{"quantization": "8bit"}, {"dtype": "bfloat16"}])
def test_rounding_of_reduced_precision_is_no_alarm(make_policy: MakePolicy, settings: dict[str, object]):
    policy = make_policy("qwen2", **settings)
    assert Canary(policy, SlotEngine(policy, 4), tolerance=1e-3).check() < 0.1


def test_the_alarm_grows_with_what_the_number_format_can_tell_apart(make_policy: MakePolicy):
    """Hub models have logits of 20 and more, of which bfloat16 writes every eighth or quarter."""
    policy = make_policy("qwen2", dtype="bfloat16")
    canary = Canary(policy, SlotEngine(policy, 4), tolerance=1e-3)
    ids = torch.tensor([[*canary._prompt, *canary._answer]])
    off = [0.0]

    class Off(StaleEngine):
        def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
            found = policy.token_logprobs([(prompt, answer)]).logprobs[0].tolist()
            return [one + off[0] for one in found]

    canary = Canary(policy, Off(policy), tolerance=1e-3)
    with torch.no_grad():
        head = policy.model.get_output_embeddings().weight
        head.mul_(32 / policy.model(input_ids=ids).logits.abs().max())
    for off[0] in (0.15, 0.4):
        canary.check()
    off[0] = 0.6
    with pytest.raises(TrainingError, match=r"within 0\.5 nats"):
        canary.check()
