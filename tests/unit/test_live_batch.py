"""Batches that requests join while they run: the same tokens as alone, and slots that are free again."""

from collections.abc import Callable, Iterable

import pytest
import torch

from swarm.config import RolloutsSection
from swarm.engine.engine import AnswerRequest
from swarm.engine.live_batch import LiveBatch, LiveRequest, SampledToken, open_batch
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.errors import MemoryBudgetError, TrainingError
from swarm.policy.policy import Policy

Make = Callable[..., Policy]
MODELS = ("llama", "qwen2", "mistral", "falcon_h1")
SEVERAL = (
    ("Hi", 2, 30, Sampling(), 1, ()),
    ("What is 7 + 5?", 1, 12, Sampling(temperature=0), 2, ()),
    ("Spell this backward, please: swarm", 3, 40, Sampling(temperature=0.7, top_p=0.9), 3, ("e", "a")),
    ("a" * 300, 3, 25, Sampling(top_k=5), 4, ()),
    ("b", 1, 40, Sampling(min_p=0.1), 5, ("q",)),
)


@pytest.fixture(autouse=True)
def in_inference_mode() -> Iterable[None]:
    with torch.inference_mode():
        yield


def rollouts(**settings: object) -> RolloutsSection:
    return RolloutsSection.model_validate({"max_batch_sequences": 4, **settings})


def live(policy: Policy, place: int = 0) -> list[LiveRequest]:
    return [
        LiveRequest(policy.encode_prompt(text), count, most, sampling, seed, stop, place)
        for text, count, most, sampling, seed, stop in SEVERAL
    ]


def alone(policy: Policy, request: LiveRequest) -> list[tuple[tuple[int, ...], str]]:
    engine = make_engine(policy, rollouts())
    prompt = AnswerRequest(request.prompt, request.num_answers, request.max_new_tokens)
    asked = [AnswerRequest(request.prompt, 0, 1)] * request.place + [prompt]
    answers = engine.generate(asked, request.sampling, seed=request.seed, stop=request.stop)[-1]
    return [(one.token_ids, one.end) for one in answers]


def finish(batch: LiveBatch, tokens: list[SampledToken]) -> list[SampledToken]:
    for _ in range(1000):
        new = batch.step()
        if not new:
            return tokens
        tokens += new
    raise AssertionError("it must end")


def answers(tokens: Iterable[SampledToken], number: int, count: int) -> list[tuple[tuple[int, ...], str | None]]:
    own = [[one for one in tokens if (one.request, one.sample) == (number, sample)] for sample in range(count)]
    assert all(one.end is None for some in own for one in some[:-1])
    return [(tuple(one.token_id for one in some), some[-1].end) for some in own]


@pytest.mark.parametrize("name", MODELS)
def test_requests_that_arrive_while_others_run_get_the_tokens_they_get_alone(make_policy: Make, name: str) -> None:
    policy = make_policy(name)
    batch = open_batch(policy, rollouts(), 400)
    tokens: list[SampledToken] = []
    for number, request in enumerate(live(policy), 10):
        batch.add(number, request)
        for _ in range(3):
            tokens += batch.step()
    finish(batch, tokens)
    for number, request in enumerate(live(policy), 10):
        assert answers(tokens, number, request.num_answers) == alone(policy, request)


def test_a_step_tells_each_token_at_once_with_its_plain_logprob(make_policy: Make) -> None:
    policy = make_policy("llama")
    request = LiveRequest(policy.encode_prompt("Hi"), 1, 8, Sampling(temperature=2.0), 7)
    batch = open_batch(policy, rollouts(), 100)
    batch.add(0, request)
    first = batch.step()
    assert len(first) == 1
    tokens = finish(batch, first)
    prompt = AnswerRequest(request.prompt, 1, 8)
    ((answer,),) = make_engine(policy, rollouts()).generate([prompt], request.sampling, seed=7)
    assert [one.token_id for one in tokens] == list(answer.token_ids)
    assert [one.logprob for one in tokens] == pytest.approx(answer.policy_logprobs, abs=1e-5)


def test_answers_that_wait_for_memory_are_the_same(make_policy: Make) -> None:
    policy = make_policy("llama")
    token_bytes = make_engine(policy, rollouts()).answer_bytes(1)
    batch = open_batch(policy, rollouts(cache_mib=1), 400)
    assert batch.max_tokens == min(400, 2**20 // token_bytes)
    request = LiveRequest(policy.encode_prompt("x" * 100), 4, 200, Sampling(temperature=3.0), 1)
    batch.add(0, request)
    assert answers(finish(batch, []), 0, 4) == alone(policy, request)


def test_a_second_prompt_of_one_question_gets_what_it_gets_in_one_call(make_policy: Make) -> None:
    policy = make_policy("llama")
    first, second = live(policy)[0], live(policy, place=1)[0]
    batch = open_batch(policy, rollouts(), 400)
    batch.add(0, first)
    batch.add(1, second)
    tokens = finish(batch, [])
    assert answers(tokens, 0, 2) == alone(policy, first) != alone(policy, second) == answers(tokens, 1, 2)


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_a_dropped_request_frees_its_slots_and_changes_nothing_for_others(make_policy: Make, name: str) -> None:
    policy = make_policy(name)
    gone = LiveRequest(policy.encode_prompt("Hi there"), 4, 200, Sampling(temperature=3.0), 9)
    batch = open_batch(policy, rollouts(), 400)
    batch.add(0, gone)
    batch.add(1, live(policy)[2])
    before = [] if name == "falcon_h1" else batch.step() + batch.step()
    assert {one.request for one in before} <= {0}, "all slots are taken"
    batch.drop(0)
    batch.drop(0)
    tokens = finish(batch, [])
    assert {one.request for one in tokens} == {1}
    assert answers(tokens, 1, 3) == alone(policy, live(policy)[2])


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_the_base_is_served_beside_the_adapter_from_the_same_weights(make_policy: Make, name: str) -> None:
    trained, untrained = make_policy(name), make_policy(name, trained=False)
    both = [open_batch(trained, rollouts(), 400, without_adapter=base) for base in (False, True)]
    request = live(trained)[0]
    tokens: list[list[SampledToken]] = [[], []]
    for batch in both:
        batch.add(0, request)
    for _ in range(60):
        for batch, told in zip(both, tokens, strict=True):
            told += batch.step()
    assert answers(tokens[0], 0, 2) == alone(trained, request)
    assert answers(tokens[1], 0, 2) == alone(untrained, request)
    assert alone(trained, request) != alone(untrained, request)


def test_weights_that_give_no_probabilities_are_told(make_policy: Make) -> None:
    policy = make_policy("llama")
    policy.model.get_input_embeddings().weight.fill_(float("nan"))
    batch = open_batch(policy, rollouts(), 100)
    batch.add(0, live(policy)[0])
    with pytest.raises(TrainingError, match="finite"):
        batch.step()


def test_memory_for_no_token_is_told(make_policy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.engine.live_batch.available_bytes", lambda device: 10)
    with pytest.raises(MemoryBudgetError, match="cache_mib"):
        open_batch(make_policy("llama"), rollouts(), 100)


def test_prompts_of_unlike_lengths_are_kept_apart_after_a_pause(make_policy: Make) -> None:
    policy = make_policy("llama")
    batch = open_batch(policy, rollouts(max_batch_sequences=16), 400)
    batch.add(0, LiveRequest(tuple(range(10, 90)) * 3, 16, 8, Sampling(), 1))
    finish(batch, [])
    requests = {
        1: LiveRequest(tuple(range(20, 100)) * 3, 2, 90, Sampling(), 2),
        2: LiveRequest((7, 8, 9), 2, 90, Sampling(), 3),
    }
    for number, request in requests.items():
        batch.add(number, request)
    tokens = finish(batch, [])
    for number, request in requests.items():
        assert answers(tokens, number, 2) == alone(policy, request)


def test_requests_that_come_and_go_leave_nothing_behind(make_policy: Make) -> None:
    policy = make_policy("llama")
    batch = open_batch(policy, rollouts(), 400)
    for number in range(30):
        batch.add(number, live(policy)[number % len(SEVERAL)])
        batch.step()
        if number % 3 == 0:
            batch.drop(number)
    finish(batch, [])
    run = batch._run  # type: ignore[attr-defined]
    assert not any((run._prompts, run._calls, run._places, run._shared, run.num_missing, run.completions, run._queue))
    assert not run.cache.answers
