"""The OpenAI API of a policy, asked by the `openai` client and by clients that do what they should not."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.config import Config, PolicySection, parse
from swarm.engine import live_batch
from swarm.engine.engine import AnswerRequest
from swarm.engine.live_batch import SampledToken
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.errors import TrainingError
from swarm.observability.http_server import HttpServer
from swarm.observability.metrics import Metrics
from swarm.policy.policy import Policy, load_policy
from swarm.serving import openai_api, served_policy
from swarm.serving.openai_api import OpenAIApi
from swarm.serving.served_policy import ServedPolicy
from swarm.serving.texts import TextStream
from tests.unit.tiny_models import perturb

MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
LONG = {"temperature": 2.0, "max_tokens": 400, "seed": 5}
"""An answer that does not end soon."""


@dataclass
class Rig:
    served: ServedPolicy
    address: str
    config: Config

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.address, trust_env=False, timeout=30, **options)

    async def post(self, kind: str = "chat/completions", **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.client() as client:
            asked = {"model": "mine", **({"messages": MESSAGES} if kind == "chat/completions" else {}), **body}
            answer = await client.post(kind, json=asked)
            return answer.status_code, answer.json()

    async def idle(self) -> None:
        """Until no answer is open, and the compute thread has none."""
        async with asyncio.timeout(20):
            while self.served.service.num_open:
                await asyncio.sleep(0.01)
            done = asyncio.Event()
            loop = asyncio.get_running_loop()
            self.served.service.between_answers(lambda: loop.call_soon_threadsafe(done.set))
            await done.wait()


@pytest.fixture(scope="module")
def policy() -> Policy:
    loaded = load_policy(PolicySection(), device="cpu")
    perturb(loaded)
    loaded.eos_token_ids = (loaded.vocab_size,)  # never sampled: answers end at their limit
    return loaded


@pytest.fixture
def rig(policy: Policy) -> Callable[..., Any]:
    @asynccontextmanager
    async def running(
        token: str = "", context: int = 480, max_answers: int = 16, **sections: Any
    ) -> AsyncIterator[Rig]:
        config = parse(sections)
        pages: list[Any] = []
        server = HttpServer(config.observability, Metrics(), dict, pages, token)
        async with ServedPolicy(policy, config, 3, context=context, max_answers=max_answers, with_base=True) as served:
            pages += OpenAIApi(served, "mine").routes()
            await server.start()
            try:
                yield Rig(served, f"http://127.0.0.1:{server.port}/v1/", config)
            finally:
                await server.stop()

    return running


def expected(policy: Policy, n: int, *, seed: int, sampling: Sampling, most: int = 24) -> list[str]:
    prompt = AnswerRequest(policy.encode_prompt("What is 3 + 4?"), n, most)
    (answers,) = make_engine(policy, parse({}).rollouts).generate([prompt], sampling, seed=seed)
    return [policy.decode(one.token_ids) for one in answers]


@pytest.mark.extra("openai")
async def test_the_openai_client_gets_chats_completions_models_and_streams(rig: Any, policy: Policy) -> None:
    from openai import AsyncOpenAI

    async with rig() as running, AsyncOpenAI(base_url=running.address, api_key="unused") as client:
        assert [model.id async for model in client.models.list()] == ["mine", "mine-base"]
        assert (await client.models.retrieve("mine")).id == "mine"
        chat = await client.chat.completions.create(
            model="mine", messages=MESSAGES, n=3, seed=7, temperature=0.8, top_p=0.9, logprobs=True
        )
        texts = expected(policy, 3, seed=7, sampling=Sampling(temperature=0.8, top_p=0.9))
        assert [choice.message.content for choice in chat.choices] == texts
        assert [choice.message.role for choice in chat.choices] == ["assistant"] * 3
        logprobs = [choice.logprobs.content for choice in chat.choices]
        assert chat.usage.completion_tokens == sum(map(len, logprobs))
        assert chat.usage.prompt_tokens == len(policy.encode_prompt("What is 3 + 4?"))
        assert all(token.logprob < 0 for tokens in logprobs for token in tokens)
        stream = await client.chat.completions.create(
            model="mine", messages=MESSAGES, n=3, seed=7, temperature=0.8, top_p=0.9, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        parts: list[Any] = [chunk async for chunk in stream]
        streamed = ["".join(c.delta.content or "" for p in parts for c in p.choices if c.index == i) for i in range(3)]
        assert streamed == texts
        assert parts[-1].usage == chat.usage
        ends = {choice.index: choice.finish_reason for part in parts for choice in part.choices if choice.finish_reason}
        assert ends == {choice.index: choice.finish_reason for choice in chat.choices}
        completion = await client.completions.create(model="mine-base", prompt=["ab", "c"], max_tokens=4, temperature=0)
        assert [choice.index for choice in completion.choices] == [0, 1]
        tokens = [part async for part in await client.completions.create(
            model="mine-base", prompt=["ab", "c"], max_tokens=4, temperature=0, stream=True
        )]  # fmt: skip
        for choice in completion.choices:
            assert choice.text == "".join(c.text for part in tokens for c in part.choices if c.index == choice.index)


@pytest.mark.extra("openai")
async def test_several_clients_at_once_share_a_batch_and_get_what_each_gets_alone(rig: Any, policy: Policy) -> None:
    from openai import AsyncOpenAI

    async with rig() as running, AsyncOpenAI(base_url=running.address, api_key="unused") as client:

        async def ask(seed: int) -> str:
            chat = await client.chat.completions.create(
                model="mine", messages=MESSAGES, seed=seed, temperature=1.0 + seed / 10
            )
            return chat.choices[0].message.content

        together = await asyncio.gather(*map(ask, range(8)))
    for seed, text in enumerate(together):
        assert text == expected(policy, 1, seed=seed, sampling=Sampling(temperature=1.0 + seed / 10))[0]


@pytest.mark.extra("openai")
async def test_the_openai_client_raises_the_error_of_each_refusal(rig: Any) -> None:
    import openai

    async with rig(token="right") as running:
        for key, error in (("wrong", openai.AuthenticationError), ("", openai.AuthenticationError)):
            async with openai.AsyncOpenAI(base_url=running.address, api_key=key or "x", max_retries=0) as client:
                with pytest.raises(error, match="token is missing or wrong"):
                    await client.models.list()
        async with openai.AsyncOpenAI(base_url=running.address, api_key="right", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="there is mine and mine-base"):
                await client.chat.completions.create(model="theirs", messages=MESSAGES)
            with pytest.raises(openai.BadRequestError, match="tools is not supported") as refused:
                await client.chat.completions.create(model="mine", messages=MESSAGES, tools=[{"type": "function"}])
            assert refused.value.param == "tools" and refused.value.code == "unsupported_parameter"


async def test_requests_that_run_longer_let_others_in_between(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is at its tenth token until the second one comes, and is not done when that has ended."""
    num_asked, second_came, has_ended, may_end = itertools.count(1), *(threading.Event() for _ in range(3))

    def add(batch: Any, *arguments: Any) -> None:
        added(batch, *arguments)
        if next(num_asked) == 2:
            second_came.set()

    def step(batch: Any) -> list[SampledToken]:
        if (step.done >= 10 and not second_came.is_set()) or (has_ended.is_set() and not may_end.is_set()):
            return []
        tokens = stepped(batch)
        step.done += bool(tokens)
        if any(one.end for one in tokens):
            has_ended.set()
        return tokens

    step.done = 0  # type: ignore[attr-defined]
    added, stepped = live_batch._LiveSlots.add, live_batch._LiveSlots.step
    monkeypatch.setattr(live_batch._LiveSlots, "add", add)
    monkeypatch.setattr(live_batch._LiveSlots, "step", step)
    async with rig() as running, running.client() as client:
        body = {"model": "mine", "prompt": "a", **LONG, "stream": True}
        async with client.stream("POST", "completions", json=body) as slow:
            lines = slow.aiter_lines()
            await anext(lines)
            status, quick = await running.post("completions", prompt="b", max_tokens=2, seed=1)
            assert status == 200 and quick["usage"]["completion_tokens"] == 2
            assert running.served.service.num_open == 1, "the first one goes on"
            may_end.set()
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
    assert step.done == LONG["max_tokens"], "they shared their steps"


async def test_a_stop_string_ends_the_answer_and_is_left_out(rig: Any) -> None:
    async with rig() as running:
        _, whole = await running.post("completions", prompt="a", **LONG)
        text = whole["choices"][0]["text"]
        stop = text[7:10]
        _, cut = await running.post("completions", prompt="a", **LONG, stop=[stop, "never said so"])
        assert cut["choices"][0]["text"] == text[: text.index(stop)]
        assert cut["choices"][0]["finish_reason"] == "stop"
        async with running.client() as client:
            body = {"model": "mine", "prompt": "a", **LONG, "stop": stop, "stream": True}
            answer = await client.post("completions", json=body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == cut["choices"][0]["text"]


async def test_stop_strings_of_the_node_end_answers_and_stay(rig: Any) -> None:
    async with rig() as running:
        _, whole = await running.post("completions", prompt="a", **LONG)
    stop = whole["choices"][0]["text"][7:10]
    async with rig(rollouts={"stop": [stop]}) as running:
        _, cut = await running.post("completions", prompt="a", **LONG)
    text = whole["choices"][0]["text"]
    assert cut["choices"][0]["text"] == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"model": "theirs"}, 404, "model_not_found", "model"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_value", "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "invalid_value", None),
        ({"messages": [{"role": "user", "content": "x" * 490}]}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "context_length_exceeded", "messages"),
        ({"max_tokens": 5000}, 400, "context_length_exceeded", "messages"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"n": 17}, 400, None, "n"),
        ({"n": 10**30}, 400, None, "n"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"top_p": 0}, 400, "invalid_value", "top_p"),
        ({"stop": ["x"] * 17}, 400, "invalid_value", "stop"),
        ({"stop": [""]}, 400, "invalid_value", None),
        ({"seed": 2**80}, 400, "invalid_value", "seed"),
        ({"frequency_penalty": 0.5}, 400, "unsupported_parameter", "frequency_penalty"),
        ({"top_logprobs": 3}, 400, "unsupported_parameter", "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
        ({"unheard_of": 1}, 400, "unsupported_parameter", "unheard_of"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    rig: Any, body: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    async with rig() as running:
        told, answer = await running.post(**body)
        assert told == status, answer
        error = answer["error"]
        assert error["code"] == code and error["type"] == "invalid_request_error" and len(error["message"]) < 600
        assert param is None or error["param"] == param
        assert running.served.service.num_open == 0


async def test_values_that_ask_for_nothing_are_let_through(rig: Any) -> None:
    async with rig() as running:
        nothing = {"tools": [], "tool_choice": "auto", "frequency_penalty": 0, "response_format": {"type": "text"},
                   "logit_bias": None, "user": "somebody", "stop": None, "max_completion_tokens": 3, "echo": False}  # fmt: skip
        status, answer = await running.post(**nothing)
        assert status == 200 and answer["usage"]["completion_tokens"] <= 3, answer


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": "mine", "prompt": "\\ud800"}', b"[" * 5000])
async def test_bodies_that_are_no_request_are_refused(rig: Any, body: bytes) -> None:
    async with rig() as running, running.client() as client:
        answer = await client.post("completions", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]


async def test_a_body_that_is_too_large_or_never_ends_is_refused(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_api, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(openai_api, "_BODY_TIMEOUT_S", 0.2)
    async with rig() as running, running.client() as client:
        answer = await client.post("completions", content=b"x" * 2000)
        assert answer.status_code == 413

        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.address.split(":")[2].split("/")[0]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        head = await asyncio.wait_for(reader.readline(), 10)
        assert b" 408 " in head
        writer.close()


async def test_token_ids_are_prompts_and_only_those_there_are(rig: Any, policy: Policy) -> None:
    async with rig() as running:
        ids = running.served.texts.text("ab")
        _, by_ids = await running.post("completions", prompt=ids, seed=1)
        _, by_text = await running.post("completions", prompt="ab", seed=1)
        assert by_ids["choices"] == by_text["choices"]
        for wrong in ([policy.vocab_size], [-1], [], [[]], ""):
            status, answer = await running.post("completions", prompt=wrong)
            assert status in (200, 400) and (status == 400 or wrong == ""), answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_slots(rig: Any, stream: bool) -> None:
    async with rig() as running:
        async with running.client() as client:
            body = {"model": "mine", "prompt": "a", **LONG, "n": 8, "stream": stream}
            asking = asyncio.create_task(client.post("completions", json=body))
            async with asyncio.timeout(20):
                while running.served.service.num_open < 8:
                    await asyncio.sleep(0.005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await running.idle()
        status, answer = await running.post("completions", prompt="b", max_tokens=2)
        assert status == 200, answer


async def test_more_than_may_wait_are_told_to_come_again(rig: Any) -> None:
    async with rig(max_answers=4) as running, running.client() as client:
        going_on = threading.Event()
        running.served.service.between_answers(lambda: bool(going_on.wait(30)))
        waiting = asyncio.create_task(running.post("completions", prompt="a", n=3))
        async with asyncio.timeout(20):
            while running.served.service.num_open < 3:
                await asyncio.sleep(0.005)
        answer = await client.post("completions", json={"model": "mine", "prompt": "b", "n": 2})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        last = asyncio.create_task(running.post("completions", prompt="b"))
        going_on.set()
        assert [status for status, _ in await asyncio.gather(waiting, last)] == [200, 200]
        await running.idle()


async def test_pages_of_others_and_renamed_hosts_are_refused(rig: Any) -> None:
    async with rig() as running, running.client() as client:
        for headers, status in (
            ({"host": "evil.example"}, 421),
            ({"origin": "http://evil.example"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
        ):
            answer = await client.post("completions", json={"model": "mine", "prompt": "b"}, headers=headers)
            assert answer.status_code == status


async def test_with_a_token_nothing_is_told_without_it(rig: Any) -> None:
    async with rig(token="right") as running, running.client() as client:
        for path in ("models", "completions", "../metrics", "../health", "../nothing"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": "Basic right"})).status_code == 401
        assert (await client.get("models", headers={"authorization": "Bearer right"})).status_code == 200


async def test_a_failure_of_sampling_is_told_and_the_next_request_works(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tokens: object) -> None:
        raise TrainingError("NaN")

    async with rig() as running, running.client() as client:
        with monkeypatch.context() as broken:
            broken.setattr(live_batch, "_finite", fail)
            status, answer = await running.post("completions", prompt="a")
            assert (status, answer["error"]["type"], answer["error"]["message"]) == (500, "server_error", "NaN")
            streamed = await client.post("completions", json={"model": "mine", "prompt": "a", "stream": True})
            assert '"server_error"' in streamed.text and "[DONE]" not in streamed.text
        status, _ = await running.post("completions", prompt="a")
        assert status == 200 and running.served.service.num_open == 0


async def test_a_newer_checkpoint_is_taken_between_answers(
    rig: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way ends with the weights it began with; what comes next has the new ones."""
    before, loop, is_loaded = read_adapter(policy.model), asyncio.get_running_loop(), asyncio.Event()

    def load(policy: Policy, config: Config) -> int:
        write_adapter(policy.model, {name: one * 0 for name, one in before.items()})
        loop.call_soon_threadsafe(is_loaded.set)
        return 9

    monkeypatch.setattr(served_policy, "_RELOAD_INTERVAL_S", 0.01)
    monkeypatch.setattr(served_policy, "newest_round", lambda config: 9)
    monkeypatch.setattr(served_policy, "load_newest_into", load)
    try:
        async with rig() as running, running.client() as client:
            _, old = await running.post("completions", prompt="a", **LONG)
            _, base = await running.post("completions", model="mine-base", prompt="a", **LONG)
            body = {"model": "mine", "prompt": "a", **LONG, "stream": True}
            async with client.stream("POST", "completions", json=body) as slow:
                lines = slow.aiter_lines()
                first = await anext(lines)
                following = asyncio.create_task(running.served.follow())
                told = [first, *[line async for line in lines]]
            async with asyncio.timeout(20):
                await is_loaded.wait()
            following.cancel()
            events = [json.loads(line[6:]) for line in told if line.startswith("data: {")]
            assert "".join(event["choices"][0]["text"] for event in events) == old["choices"][0]["text"]
            _, new = await running.post("completions", prompt="a", **LONG)
            assert new["choices"][0]["text"] == base["choices"][0]["text"] != old["choices"][0]["text"]
            models = (await client.get("models")).json()["data"]
            assert models[0]["round"] == 9 and "round" not in models[1]
    finally:
        write_adapter(policy.model, before)


async def test_a_damaged_checkpoint_is_tried_once_and_the_next_one_is_taken(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the newest gives the one before, or an error, for as long as the newest is damaged."""
    newest, looks, loads = 9, 0, list[int]()

    def look(config: Config) -> int:
        nonlocal looks
        looks += 1
        return newest

    def load(policy: Policy, config: Config) -> int:
        loads.append(newest)
        return 10 if newest == 10 else 3

    monkeypatch.setattr(served_policy, "_RELOAD_INTERVAL_S", 0.01)
    monkeypatch.setattr(served_policy, "newest_round", look)
    monkeypatch.setattr(served_policy, "load_newest_into", load)
    async with rig() as running:
        following = asyncio.create_task(running.served.follow())
        async with asyncio.timeout(20):
            while looks < 10:
                await asyncio.sleep(0.01)
            await running.idle()
            assert loads == [9] and running.served.round == 3
            newest = 10
            while running.served.round != 10:
                await asyncio.sleep(0.01)
        following.cancel()
    assert loads == [9, 10]


async def test_conversations_begin_as_the_tasks_did_unless_they_say_otherwise(rig: Any, policy: Policy) -> None:
    async with rig(
        tasks={"sources": [{"kind": "reasoning_gym", "name": "chain_sum", "system": "Be brief."}]}
    ) as running:
        texts = running.served.texts
        plain = texts.conversation([{"role": "system", "content": "Be brief."}, *MESSAGES])
        assert texts.conversation(MESSAGES) == plain != policy.encode_prompt("What is 3 + 4?")
        assert texts.conversation([{"role": "system", "content": "No."}, *MESSAGES]) != plain


@given(
    st.lists(st.text(alphabet="abä☃😀 \n", min_size=1, max_size=3)), st.lists(st.text("ab☃", min_size=1), max_size=3)
)
def test_pieces_of_a_text_make_the_text_up_to_its_first_stop(parts: list[str], cut: list[str]) -> None:
    """Over single bytes, so that characters come in several tokens."""
    tokens = list("".join(parts).encode())
    text = bytes(tokens).decode()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), cut)
    told = [stream.push([token], is_last=place == len(tokens) - 1) for place, token in enumerate(tokens)]
    whole = next((text[:size] for size in range(len(text) + 1) if any(one in text[:size] for one in cut)), text)
    assert "".join(told) == whole[: min((whole.find(one) for one in cut if one in whole), default=None)]
    assert all(one not in "".join(told[:length]) for one in cut for length in range(len(told)))
