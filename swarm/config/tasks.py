"""What the policy is trained on."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from swarm.config.section import Section
from swarm.extensions.points import FINAL_ANSWERS, TASK_SOURCES, VERIFIERS

Weight = Annotated[float, Field(gt=0, le=1e9)]  # sums of weights stay finite


class RewardSignalSection(Section):
    """One of several signals that make up a reward."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
    """correct, format, length, tests (code tasks), or a reward function that an installed package offers; see rewards.md."""
    weight: Weight = 1.0
    """Share of the reward, relative to the other signals'."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the signal, such as {pattern = "..."} or {tags = ["answer"]} of format, {max_chars = 200} of length."""


_MAX_ASKED_CHARS = 32_768
"""Characters of a system prompt and all examples together: rendered several times over, they fit into one reply."""
_CALL_ARGUMENTS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversations", "documents", "messages",
        "return_assistant_tokens_mask", "self", "tools",
    }
)  # fmt: skip
"""Names that the rendering itself gives to a chat template, beside those of special tokens (`bos_token`)."""
_ARGUMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_ARGUMENT_WORDS = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,31}")  # no special token can be written with it
_MAX_ARGUMENT = 10**12


class ExampleSection(Section):
    """One example of a prompt and its answer, which stands before the prompt of every task."""

    prompt: Annotated[str, Field(pattern=r"\S")]
    """What the user asks."""
    answer: Annotated[str, Field(pattern=r"\S")]
    """What the assistant answers."""


class TaskSourceFacts(Section):
    """The settings of one task source that all nodes share."""

    kind: Annotated[str, TASK_SOURCES] = "reasoning_gym"
    """Where the tasks come from."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    """Name of a reasoning-gym data set, `list_functions` for made-up code tasks, or else a name of your own."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    """Name in tables and records; defaults to `name`. Needed when one data set appears twice at different difficulty."""
    weight: Weight = 1.0
    """Share of the tasks drawn, relative to the other sources'."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the data set, such as {max_digits = 2}; of code tasks also the limits {cpu_s = 2, memory_mib = 256}."""
    verifier: Annotated[str, VERIFIERS] = "exact"
    """Verifier for lines of a JSONL file that name none."""
    signals: tuple[RewardSignalSection, ...] = ()
    """Signals whose weighted sum is the reward. Empty: correctness alone."""
    system: str = ""
    """System prompt of the base's chat template."""
    examples: Annotated[tuple[ExampleSection, ...], Field(max_length=32)] = ()
    """Few-shot examples, each {prompt, answer}, as earlier turns of the chat."""
    template_arguments: dict[str, Any] = Field(default_factory=dict, max_length=16)
    """Arguments of the chat template, such as {enable_thinking = false}: booleans, numbers and short words."""
    prompt_template: Annotated[str, Field(max_length=_MAX_ASKED_CHARS)] = ""
    """Text of the user's message, in which {prompt} and other fields of the task are replaced. Empty: the prompt alone."""
    answer: Annotated[str, FINAL_ANSWERS] = "whole"
    """Which part of a text is the answer that the verifier compares; see rewards.md."""
    answer_parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of that rule, such as {tag = "answer"} of tag."""

    @property
    def source_name(self) -> str:
        return self.label or self.name

    @property
    def form(self) -> dict[str, Any]:
        """The settings of prompts and final answers that differ from their defaults, as values of JSON."""
        return self.model_dump(mode="json", include=_FORM, exclude_defaults=True)

    @model_validator(mode="after")
    def _form_is_bounded(self) -> "TaskSourceFacts":
        num_chars = len(self.system) + sum(len(one.prompt) + len(one.answer) for one in self.examples)
        if num_chars > _MAX_ASKED_CHARS:
            raise ValueError(
                f"system and examples of a source must have <= {_MAX_ASKED_CHARS} characters together, got {num_chars} of "
                f"{self.source_name!r}; shorten them"
            )
        if self.system and not self.system.strip():
            raise ValueError(f"system must have a letter, got white space of {self.source_name!r}; remove it")
        for name, value in self.template_arguments.items():
            if mistake := _argument_mistake(name, value):
                raise ValueError(f"template_arguments must {mistake} of {self.source_name!r}; remove or change it")
        return self


def _argument_mistake(name: str, value: Any) -> str:
    """The rule that an argument breaks, and the value; empty where it breaks none."""
    if _ARGUMENT_NAME.fullmatch(name) is None:
        return f"have names of letters, digits and _, got {name[:64]!a}"
    if name in _CALL_ARGUMENTS or name.endswith(("_token", "_tokens")):
        return f"not replace what the rendering itself sets, got {name}"
    is_word = isinstance(value, str) and _ARGUMENT_WORDS.fullmatch(value) is not None
    is_number = isinstance(value, int | float) and abs(value) <= _MAX_ARGUMENT  # NaN and infinity are not
    if not is_word and not is_number:
        shown = ascii(value)[:80] if isinstance(value, str | bool | float) else type(value).__name__
        return f"be true, false, numbers within ±1e12 or words of <= 32 letters, digits, spaces and _.-, got {name} = {shown}"
    return ""


_FORM = {"system", "examples", "template_arguments", "prompt_template", "answer", "answer_parameters"}


class TaskSourceSection(TaskSourceFacts):
    """One task source."""

    path: Path | None = None
    """JSONL file with one {"prompt", "answer", "verifier"} object per line; code: {"prompt", "entry", "tests", "answer"}."""

    @model_validator(mode="after")
    def _path_matches_kind(self) -> "TaskSourceSection":
        if self.kind == "jsonl" and self.path is None:
            raise ValueError(f"a jsonl source needs a path, got none; set path for source {self.name!r}")
        if self.kind == "reasoning_gym" and self.path is not None:
            raise ValueError(f"path belongs to jsonl sources, got kind reasoning_gym; remove path of {self.name!r}")
        return self

    @model_validator(mode="after")
    def _signals_are_unique(self) -> "TaskSourceSection":
        names = [signal.name for signal in self.signals]
        if len(set(names)) < len(names):
            raise ValueError(f"signals of a source must have different names, got {names}; remove one of {self.name!r}")
        return self


DEMO_TASKS = (
    TaskSourceSection(
        name="chain_sum", label="sums", parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    ),
    TaskSourceSection(
        name="chain_sum",
        label="longer_sums",
        parameters={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    ),
    TaskSourceSection(name="spell_backward", label="spelling", parameters={"min_word_len": 3, "max_word_len": 5}),
    TaskSourceSection(
        name="spell_backward", label="longer_spelling", parameters={"min_word_len": 6, "max_word_len": 8}
    ),
    TaskSourceSection(name="lcm", parameters={"min_value": 2, "max_value": 15}),
    TaskSourceSection(name="products", parameters={"min_digits": 1, "max_digits": 1}),
)
"""What the bundled policy was made for, easy settings and harder ones."""

_STEPS = "Work in steps inside <think></think>, then write the result inside <answer></answer>."


def _in_steps(name: str, label: str, **parameters: Any) -> TaskSourceSection:
    return TaskSourceSection(name=name, label=label, parameters=parameters, system=_STEPS, answer="tag")


REASONING_TASKS = (
    _in_steps("chain_sum", "long_sums", min_terms=2, max_terms=2, min_digits=4, max_digits=6),
    _in_steps("products", "long_products", min_digits=2, max_digits=2),
    _in_steps(
        "basic_arithmetic",
        "chains",
        min_terms=3,
        max_terms=5,
        min_digits=1,
        max_digits=1,
        operators=["+", "-", "*"],
        allow_negation=False,
    ),
    _in_steps(
        "number_sorting",
        "sorting",
        min_numbers=4,
        max_numbers=6,
        min_decimals=0,
        max_decimals=0,
        min_value=0,
        max_value=999,
    ),
    _in_steps("leg_counting", "legs", min_animals=3, max_animals=5),
)
"""What the bundled reasoning policy was made for: its answers need steps."""


class TasksSection(Section):
    """What the policy is trained on."""

    sources: Annotated[tuple[TaskSourceSection, ...], Field(min_length=1)] = DEMO_TASKS
    """Weighted mixture of task sources. All nodes of a swarm use the same list."""
    sandboxed: bool = False
    """Build and score tasks of reasoning-gym in a process that opens only files of installed packages, within bounds of time and
    memory, and allow only numbers and known words as parameters. Always true in a swarm with a manifest."""
    run_code_unsandboxed: bool = False
    """Run code of strangers even where no sandbox can be set up: it may then read your files, and outside Linux do more."""

    unsandboxed_rewards: tuple[str, ...] = ()
    """Reward functions of packages, by name, that may read your files, start programs and use the network; see rewards.md."""
    allowed_kinds: tuple[str, ...] = ()
    """Task sources of installed packages, by kind, that the manifest of a swarm may use on this node; see extending.md."""
    unsandboxed_kinds: tuple[str, ...] = ()
    """Task sources of packages, by kind, that may read your files, start programs and use the network; see extending.md."""
    reward_memory_mib: Annotated[int, Field(ge=64)] = 2048
    """Address space of one reward function of a package."""

    @model_validator(mode="after")
    def _packages_are_allowed(self) -> "TasksSection":
        """A manifest must not choose which of the installed packages is imported."""
        kinds = {source.kind for source in self.sources if not TASK_SOURCES.is_built_in(source.kind)}
        if self.sandboxed and (refused := sorted(kinds - {*self.allowed_kinds, *self.unsandboxed_kinds})):
            raise ValueError(
                f"a manifest may use a task source of a package only where you allow it, got {', '.join(refused)}; set "
                f"tasks.allowed_kinds = {refused} if you trust the package"
            )
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> "TasksSection":
        names = [source.source_name for source in self.sources]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"source names must be unique, got {doubled} twice; set a different label")
        return self
