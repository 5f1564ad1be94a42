"""The OpenAI API of a policy: /v1/models, /v1/chat/completions and /v1/completions, as a stream or whole.

body, bounded ─▶ request ─▶ token ids ─▶ `AnswerService` ─▶ chunks as they are sampled, or one answer at the end
no place: 429    wrong: 400    too long: 400      └── the client leaves, or does not read: its slots are free again
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from swarm.dashboard.feed import EventResponse, disconnected
from swarm.errors import PolicyError, SwarmError
from swarm.limits.connection_slots import ConnectionSlots
from swarm.serving.openai_requests import ChatRequest, CompletionRequest, RequestError, read_request
from swarm.serving.served_policy import ServedPolicy
from swarm.serving.service import Asked, BusyError, Piece

MAX_BODY_BYTES = 4 << 20
_MAX_BODY_VALUES = 200_000
_BODY_TIMEOUT_S = 20.0
_MAX_CHARS_PER_TOKEN = 64
"""Texts of more characters for each token that fits are refused before the tokenizer reads them."""


@dataclass(slots=True)
class _Call:
    """One request under way."""

    request: ChatRequest | CompletionRequest
    asked: Asked
    num_prompt_tokens: int
    fingerprint: str
    num_sampled: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_sampled,
            "total_tokens": self.num_prompt_tokens + self.num_sampled,
        }

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' if is_chunk else ''}"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": self.fingerprint,
        }


class OpenAIApi:
    """The routes of the API. It runs on the loop of the policy's service."""

    def __init__(self, served: ServedPolicy, name: str) -> None:
        """`name`: of the model; its base, if that is served, is called NAME-base."""
        self._served = served
        self._service = served.service
        self.names = {name: False, **({f"{name}-base": True} if served.with_base else {})}
        """Whether each model is the base."""
        self._created = int(time.time())
        self._places = ConnectionSlots(served.service.max_answers)

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._get_model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/{path:path}", self._get_nothing, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._shown(name) for name in self.names]})

    async def _get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._shown(name)) if name in self.names else _refused(self._no_model(name))

    async def _get_nothing(self, request: Request) -> Response:
        return _refused(
            RequestError(
                404, f"there is no {request.method} {request.url.path[:100]}; see /v1/models", code="not_found"
            )
        )

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def _answer(self, http: Request, kind: type[Any]) -> Response:
        try:
            call = await self._begin(read_request(kind, await _body(http), _MAX_BODY_VALUES))
        except RequestError as error:
            return _refused(error)
        except ClientDisconnect:
            return Response(status_code=400)
        if call.request.stream:
            return _Stream(call, self._events(call), self._places)
        try:
            return await self._whole(call, http)
        finally:
            call.asked.close()

    async def _begin(self, request: ChatRequest | CompletionRequest) -> _Call:
        """Begin to sample. Raises RequestError."""
        if request.model not in self.names:
            raise self._no_model(request.model)
        prompts = await asyncio.to_thread(self._encode, request)
        longest = max(map(len, prompts))
        room = self._service.max_tokens - longest
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            wanted: int | None = request.max_completion_tokens
        else:
            wanted = request.max_tokens
        if room < (wanted or 1):
            raise RequestError(
                400,
                f"a prompt with its answer must have at most {self._service.max_tokens} tokens, got {longest} in the prompt"
                f"{f' and max_tokens = {wanted}' if wanted else ''}; shorten one of them",
                code="context_length_exceeded",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
            )
        max_new_tokens = wanted or min(self._served.config.rollouts.max_new_tokens, room)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        live = request.live(prompts, max_new_tokens, seed, self._served.config.rollouts.stop)
        num_answers = request.n * len(prompts)
        if num_answers > self._service.max_answers:
            raise RequestError(
                400, f"a request may ask for at most {self._service.max_answers} answers, got {num_answers}", param="n"
            )
        try:
            asked = self._service.ask(live, base=self.names[request.model], cut=request.stop)
        except BusyError as error:
            raise RequestError(429, str(error), code="rate_limit_exceeded") from None
        return _Call(request, asked, sum(map(len, prompts)), f"round-{self._served.round}")

    def _encode(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Return the token ids of the prompts. Raises RequestError."""
        max_chars = _MAX_CHARS_PER_TOKEN * self._service.max_tokens
        name = "messages" if isinstance(request, ChatRequest) else "prompt"
        try:
            if isinstance(request, ChatRequest):
                messages = [message.plain() for message in request.messages]
                _check_chars(sum(len(message["content"]) for message in messages), max_chars, name)
                prompts = [self._served.texts.conversation(messages)]
            else:
                _check_chars(max((len(one) for one in request.prompts), default=0), max_chars, name)
                prompts = [self._served.texts.text(one) if isinstance(one, str) else one for one in request.prompts]
        except PolicyError as error:
            raise RequestError(400, str(error), code="invalid_value", param=name) from None
        if not prompts or not all(prompts):
            raise RequestError(400, f"{name} must have at least one token each", code="invalid_value", param=name)
        if not all(0 <= token < self._served.policy.vocab_size for prompt in prompts for token in prompt):
            raise RequestError(
                400,
                f"{name} must be token ids below {self._served.policy.vocab_size}",
                code="invalid_value",
                param=name,
            )
        return prompts

    async def _whole(self, call: _Call, http: Request) -> Response:
        answering = asyncio.create_task(self._collect(call))
        leaving = asyncio.create_task(disconnected(http.receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=400)  # nobody reads it
            choices = answering.result()
        except SwarmError as error:
            return _refused(_failed(error))
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        return JSONResponse({**call.head(is_chunk=False), "choices": choices, "usage": call.usage()})

    async def _collect(self, call: _Call) -> list[dict[str, Any]]:
        answers: list[list[Piece]] = [[] for _ in range(call.asked.num_answers)]
        async for piece in call.asked.pieces():
            answers[piece.index].append(piece)
            call.num_sampled += len(piece.tokens)
        return [
            self._choice(
                call,
                Piece(
                    index,
                    "".join(piece.text for piece in pieces),
                    tuple(token for piece in pieces for token in piece.tokens),
                    pieces[-1].end,
                ),
                field="message",
            )
            for index, pieces in enumerate(answers)
        ]

    async def _events(self, call: _Call) -> AsyncIterator[bytes]:
        """The chunks of a stream."""
        head = call.head(is_chunk=True)
        if call.is_chat:
            for index in range(call.asked.num_answers):
                delta = {"role": "assistant", "content": ""}
                yield _event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        try:
            async for piece in call.asked.pieces():
                call.num_sampled += len(piece.tokens)
                if piece.text or piece.end or call.request.has_logprobs:
                    yield _event({**head, "choices": [self._choice(call, piece, field="delta")]})
        except SwarmError as error:
            yield _event(_failed(error).body())
            return
        if call.request.stream_options.include_usage:
            yield _event({**head, "choices": [], "usage": call.usage()})
        yield b"data: [DONE]\n\n"

    def _choice(self, call: _Call, piece: Piece, *, field: str) -> dict[str, Any]:
        """A part of an answer, or a whole one. `field`: delta or message, of a chat."""
        choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.end, "logprobs": None}
        if call.is_chat:
            content = {"content": piece.text}
            choice[field] = content if field == "delta" else {"role": "assistant", **content}
        else:
            choice["text"] = piece.text
        if call.request.has_logprobs:
            texts = [self._service.decode([token]) for token, _ in piece.tokens]
            logprobs = [logprob for _, logprob in piece.tokens]
            choice["logprobs"] = (
                {
                    "content": [
                        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
                        for text, logprob in zip(texts, logprobs, strict=True)
                    ]
                }
                if call.is_chat
                else {"tokens": texts, "token_logprobs": logprobs}
            )
        return choice

    def _shown(self, name: str) -> dict[str, Any]:
        own = {} if self.names[name] else {"round": self._served.round}
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "swarm",
            "root": self._served.config.policy.base, "max_model_len": self._service.max_tokens, **own,
        }  # fmt: skip

    def _no_model(self, name: str) -> RequestError:
        return RequestError(
            404,
            f"there is no model {name[:100]!r}; there is {' and '.join(self.names)}",
            code="model_not_found",
            param="model",
        )


class _Stream(EventResponse):
    """The chunks of an answer, which is left however the stream ends."""

    def __init__(self, call: _Call, events: AsyncIterator[bytes], places: ConnectionSlots) -> None:
        super().__init__(events, places)
        self._asked = call.asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._asked.close()


async def _body(request: Request) -> bytes:
    """Read the body. Raises RequestError where it is too large or comes too slowly, ClientDisconnect."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise RequestError(413, f"the body must have at most {MAX_BODY_BYTES} bytes; shorten it")
    except TimeoutError:
        raise RequestError(408, f"the body must come within {_BODY_TIMEOUT_S:g} s; send it again") from None
    return bytes(body)


def _check_chars(num_chars: int, limit: int, name: str) -> None:
    if num_chars > limit:
        raise RequestError(
            400, f"{name} must have at most {limit} characters, got {num_chars}; shorten it",
            code="context_length_exceeded", param=name,
        )  # fmt: skip


def _failed(error: SwarmError) -> RequestError:
    return RequestError(500, str(error), code="sampling_failed")


def _refused(error: RequestError) -> Response:
    headers = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, allow_nan=False)}\n\n".encode()
