"""What clients of the OpenAI API may send, as far as a policy can do it; all else is refused by name.

bytes ─▶ ChatRequest or CompletionRequest ─▶ LiveRequest, one per prompt
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from swarm.engine.live_batch import LiveRequest
from swarm.engine.sampling import Sampling
from swarm.machine.safe_files import parse_json_text

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 1024
_WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields that say something about the request and nothing about the answer."""
_AS_UNSET: tuple[Any, ...] = (None, False, 0, "", "none", "auto", [], {}, {"type": "text"})
"""Values with which a field that is not supported asks for nothing."""


class RequestError(Exception):
    """A request that is refused: as the OpenAI API tells it."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Request(BaseModel):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: Annotated[str, Field(max_length=512)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """Not in the OpenAI API; as in other servers. -1 and 0 allow all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field([], max_length=MAX_STOPS)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        return {
            name: value
            for name, value in data.items()
            if not (value is None or name in _WITHOUT_EFFECT or (name not in known and value in _AS_UNSET))
        }

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def has_logprobs(self) -> bool:
        """Whether the client wants the log-prob of each token."""
        return False

    def live(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int, stop: tuple[str, ...]
    ) -> list[LiveRequest]:
        """Return what is to be sampled: `n` answers to each prompt. `stop`: further strings that end an answer."""
        sampling = Sampling(self.temperature, max(0, self.top_k), self.top_p, self.min_p)
        stops = (*self.stop, *stop)
        return [
            LiveRequest(prompt, self.n, max_new_tokens, sampling, seed, stops, place)
            for place, prompt in enumerate(prompts)
        ]


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    """One message; its content is one text, however many parts it comes in."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    name: str | None = None
    """Has no effect, as chat templates know none."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unset(cls, data: Any) -> Any:
        """As answers come back from a client that adds all fields there are."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields or value not in _AS_UNSET}

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(_Request):
    """The body of /v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    logprobs: bool = False

    @field_validator("messages")
    @classmethod
    def _ends_with_a_question(cls, messages: list[_Message]) -> list[_Message]:
        if messages[-1].role == "assistant":
            raise ValueError("the last message must be of another role than assistant")
        return messages

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs


class CompletionRequest(_Request):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        is_tokens = bool(self.prompt) and isinstance(self.prompt[0], int)
        return [self.prompt] if is_tokens else list(self.prompt)  # type: ignore[list-item,return-value]


Kind = TypeVar("Kind", ChatRequest, CompletionRequest)


def read_request(kind: type[Kind], body: bytes, max_values: int) -> Kind:
    """Read the body of a request. Raises RequestError, which names the first field that is wrong."""
    try:
        return kind.model_validate(parse_json_text(body, max_values))
    except ValidationError as error:
        raise _refusal(error) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body must be JSON, got {str(error)[:200]}", code="invalid_json") from None


def _refusal(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "str", "constrained")))
    if first["type"] == "extra_forbidden":
        return RequestError(
            400,
            f"{name[:100]} is not supported by this server; leave it out",
            code="unsupported_parameter",
            param=name[:100],
        )
    given = "" if isinstance(first["input"], Mapping | list) else f", got {str(first['input'])[:100]!r}"
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{name or 'the body'}: {message}{given}", code="invalid_value", param=name or None)
