"""The contract of engines, for every engine that is installed; vLLM is tested where its package is present."""

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import pytest
import torch

from swarm.config import PolicySection, RolloutsSection
from swarm.engine.canary import Canary
from swarm.engine.engine import Engine
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.errors import ConfigError
from swarm.policy.policy import Policy, load_policy
from tests.unit.tiny_models import perturb, requests

KINDS = ("auto", "transformers", *(("vllm",) if find_spec("vllm") else ()))
PROMPTS = ("What is 2 + 3?", "Spell table backward.", "What is 7 times 8?")


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[tuple[Policy, Engine]]:
    policy = load_policy(PolicySection(), device="cpu")
    yield policy, make_engine(policy, RolloutsSection.model_validate({"engine": request.param, "cache_mib": 256}))


def encoded(policy: Policy) -> list[list[int]]:
    return [policy.encode_prompt(prompt) for prompt in PROMPTS]


def full_pass(policy: Policy, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return [logprobs[len(prompt) - 1 + t, token].item() for t, token in enumerate(answer)]


def test_answers_end_where_they_say(rig: tuple[Policy, Engine]) -> None:
    policy, engine = rig
    groups = engine.generate(requests(encoded(policy), [3, 0, 2], [2, 8, 12]), Sampling(), seed=5, stop=["1"])
    assert [len(group) for group in groups] == [3, 0, 2]
    for group, limit in zip(groups, (2, 8, 12), strict=True):
        for completion in group:
            assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= limit
            last_is_eos = completion.token_ids[-1] in policy.eos_token_ids
            assert last_is_eos == completion.finished == (completion.end == "eos")
            assert (completion.end == "stop") == (not last_is_eos and "1" in policy.decode(completion.token_ids))
            assert completion.end != "limit" or len(completion.token_ids) == limit


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0)])
def test_logprobs_are_those_of_the_weights_as_they_are(rig: tuple[Policy, Engine], sampling: Sampling) -> None:
    policy, engine = rig
    for _ in range(2):  # the second time other weights
        groups = engine.generate(requests(encoded(policy), 2, 10), sampling, seed=1)
        for prompt, group in zip(encoded(policy), groups, strict=True):
            for completion in group:
                plain = full_pass(policy, prompt, completion.token_ids)
                drawn = full_pass(policy, prompt, completion.token_ids, sampling.temperature or 1.0)
                assert completion.policy_logprobs == pytest.approx(plain, abs=1e-4)
                assert completion.logprobs == pytest.approx(drawn, abs=1e-4)
        perturb(policy)


def test_filters_draw_only_what_they_leave_and_say_its_probability(rig: tuple[Policy, Engine]) -> None:
    policy, engine = rig
    (group,) = engine.generate(requests(encoded(policy)[:1], 8, 1), Sampling(top_k=2), seed=1)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([encoded(policy)[0]])).logits[0, -1]
    two = logits.topk(2)
    left = dict(zip(two.indices.tolist(), two.values.log_softmax(-1).tolist(), strict=True))
    for completion in group:
        assert completion.logprobs[0] == pytest.approx(left[completion.token_ids[0]], abs=1e-4)


def test_same_seed_gives_the_same_answers_and_another_others(rig: tuple[Policy, Engine]) -> None:
    policy, engine = rig

    def answers(seed: int) -> list[list[tuple[int, ...]]]:
        groups = engine.generate(requests(encoded(policy), 4, 8), Sampling(), seed=seed)
        return [[completion.token_ids for completion in group] for group in groups]

    assert answers(3) == answers(3) != answers(4)
    assert len(set(answers(3)[0])) > 1  # siblings differ


def test_canary_agrees_after_the_weights_have_moved(rig: tuple[Policy, Engine]) -> None:
    policy, engine = rig
    canary = Canary(policy, engine, tolerance=1e-3)
    canary.check()
    perturb(policy)
    canary.check()


def test_nothing_asked_is_nothing_answered(rig: tuple[Policy, Engine]) -> None:
    _, engine = rig
    assert engine.generate(requests([], 4, 3), Sampling(), seed=0) == []


def test_engine_that_cannot_continue_answers_refuses_over_provision() -> None:
    policy = load_policy(PolicySection(), device="cpu")
    config = RolloutsSection.model_validate({"engine": "transformers", "over_provision": 2})
    with pytest.raises(ConfigError, match="over_provision above 1 needs an engine that continues answers"):
        make_engine(policy, config)


def test_engine_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not
    policy = load_policy(PolicySection(), device="cpu")
    with pytest.raises(ConfigError, match=r"-m pip install .*'vllm[<>=.,0-9]+'.*make vllm"):
        make_engine(policy, RolloutsSection(engine="vllm"))
