"""What an answer is worth: signals of a reward, languages of programs, and a judge."""

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from swarm.config.section import PositiveInt, Section
from swarm.types import is_mapping

Weight = Annotated[float, Field(gt=0, le=1e9)]  # sums of weights stay finite
LANGUAGE = r"^[a-z][a-z0-9_+-]{0,31}$"
"""Name of a language of code tasks."""
SignalName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
_FUNCTION = re.compile(rf"(?:[^\0\n]{{1,4000}}\.py|{_NAME}(?:\.{_NAME}){{0,15}}):{_NAME}")
_PACKAGE = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99}==[A-Za-z0-9][A-Za-z0-9.+!_-]{0,99})?$"


class RewardSignalSection(Section):
    """One of several signals that make up a reward."""

    name: SignalName
    """correct, format, length, tests (code tasks), judge, or a reward function that an installed package offers; see
    rewards.md. With `function` any other name, by default that of the function."""
    function: str = ""
    """Reward function of your own: FILE.py:NAME, beside the configuration, or package.module:NAME."""
    weight: Weight = 1.0
    """Share of the reward, relative to the other signals'."""
    weights: dict[SignalName, Annotated[float, Field(ge=0, le=1e9)]] = Field(default_factory=dict, max_length=8)
    """Shares of the values in the dict that the function returns; 0 is for the metrics only. Empty: all of it is `reward` where
    the dict has that name, else equal shares."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the signal, such as {pattern = "..."} or {tags = ["answer"]} of format, {max_chars = 200} of length."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 that the file of the function must have. Manifests set it."""
    package: Annotated[str, Field(pattern=_PACKAGE)] = ""
    """NAME==VERSION of the installed package that the function must come from. Manifests set it."""

    @property
    def is_of_file(self) -> bool:
        """Whether the function is in a file."""
        return self.function.rpartition(":")[0].endswith(".py")

    @property
    def is_judge(self) -> bool:
        """Whether it is the signal of a language model that grades answers."""
        return self.name == "judge" and not self.function

    @property
    def reference(self) -> str:
        """`function` without the folder of its file, as other nodes know it."""
        return self.function.rpartition("/")[2] if self.is_of_file else self.function

    @model_validator(mode="before")
    @classmethod
    def _is_named_after_its_function(cls, data: Any) -> Any:
        function = data.get("function") if is_mapping(data) else None
        if not isinstance(function, str) or not function or "name" in data:
            return data
        is_whole = _FUNCTION.fullmatch(function) is not None  # otherwise that is what must be reported, not its name
        return {**data, "name": function.rpartition(":")[2] if is_whole else "function"}

    @model_validator(mode="after")
    def _function_is_complete(self) -> "RewardSignalSection":
        if self.function and _FUNCTION.fullmatch(self.function) is None:
            raise ValueError(
                f"function of a signal must be FILE.py:NAME or package.module:NAME, got {self.function[:200]!r}; name the file "
                "or module, a colon, and the function in it"
            )
        if self.sha256 is not None and not self.is_of_file:
            raise ValueError(f"sha256 of a signal belongs to a function of a file, got it for {self.name}; remove it")
        if self.package and (self.is_of_file or not self.function):
            raise ValueError(
                f"package of a signal belongs to a function of a module, got it for {self.name}; remove it"
            )
        if self.weights and (not self.function or not sum(self.weights.values())):
            raise ValueError(
                f"weights of a signal belong to its function, and one must be more than 0, got {self.weights} for {self.name}; "
                "change or remove them"
            )
        return self


class LanguageSection(Section):
    """How programs of one language are compiled and run, in the sandbox."""

    run: Annotated[tuple[str, ...], Field(min_length=1)]
    """Command: a program, by its path or by its name in /usr/local/bin, /usr/bin or /bin, and its arguments."""
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$")]
    """Name of the file that the text of a program is written to, in the current folder of both commands."""
    compile: tuple[str, ...] = ()
    """Command that is run once before, and must succeed."""
    home: Path | None = None
    """Folder that the commands may read beside the system's programs and libraries."""
    max_processes: Annotated[int, Field(ge=0, le=64)] = 0
    """Further processes and threads that a running program may have at once."""
    extra_memory_mib: Annotated[int, Field(ge=0, le=65536)] = 0
    """Address space that the language itself takes, beside that of the program."""

    @field_validator("home")
    @classmethod
    def _home_is_absolute(cls, home: Path | None) -> Path | None:
        if home is not None and not home.is_absolute():
            raise ValueError(f"home of a language must be an absolute path, got {home}; write the whole path")
        return home


class JudgeSection(Section):
    """The endpoint of the reward signal `judge`, a language model that grades answers; see rewards.md."""

    base_url: str = ""
    """Address of an endpoint that speaks OpenAI's chat format, such as http://127.0.0.1:8000/v1."""
    api_key_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,63})?$")] = ""
    """Environment variable that has its key."""
    api_key_file: Path | None = None
    """File that has its key."""
    max_reply_tokens: Annotated[int, Field(ge=1, le=16_384)] = 512
    """Most tokens of one reply."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 60.0
    """Longest wait for one reply."""
    max_at_once: Annotated[int, Field(ge=1, le=64)] = 4
    """Most requests at the same time."""
    max_requests_per_minute: PositiveInt = 240
    """Groups whose answers would need more are dropped."""
    cache: Path | None = None
    """SQLite file with the scores of what was asked before. Unset: in memory, until the node ends."""

    @field_validator("base_url")
    @classmethod
    def _is_an_address_without_secrets(cls, address: str) -> str:
        parts = urlsplit(address)
        if address and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment):
            raise ValueError("base_url of a judge must be http://HOST:PORT/PATH or https://…; write such an address")
        if parts.username or parts.password:
            raise ValueError(
                "base_url of a judge must hold no key; put it into a variable, and name that in api_key_env"
            )
        return address

    @property
    def is_near(self) -> bool:
        """Whether the endpoint is on this machine or in a private network, by its number."""
        host = urlsplit(self.base_url).hostname or ""
        try:
            return ip_address(host).is_private
        except ValueError:
            return host == "localhost"

    @model_validator(mode="after")
    def _key_is_not_sent_in_the_open(self) -> "JudgeSection":
        has_key = bool(self.api_key_env or self.api_key_file)
        if has_key and urlsplit(self.base_url).scheme == "http" and not self.is_near:
            raise ValueError(
                "base_url of a judge with a key must be https outside of private networks; change its address"
            )
        return self
