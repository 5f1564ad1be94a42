"""What the policy is trained on."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from swarm.config.rewards import LANGUAGE, JudgeSection, LanguageSection, RewardSignalSection, Weight
from swarm.config.section import Section
from swarm.extensions.points import FINAL_ANSWERS, TASK_SOURCES, TOOLS, VERIFIERS
from swarm.types import MAX_TURNS, is_table

_Mark = Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,30}[!-~])?$")]


class ToolSection(Section):
    """One tool that answers may call."""

    name: Annotated[str, TOOLS]
    """What it does."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the tool, such as {cpu_s = 2} of python."""
    marks: Annotated[tuple[_Mark, ...], Field(max_length=2)] = ()
    """What stands before and after the text that the tool gets, as in ["<search>", "</search>"], in place of the usual forms of
    calls. Such a tool is not described to the policy: say in `system` how it is called."""

    @model_validator(mode="after")
    def _marks_are_two(self) -> "ToolSection":
        if len(self.marks) == 1:
            raise ValueError(f"marks must be two, before and after a call, got {self.marks[0]!r}; add the other one")
        return self


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
_HUB_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"  # a path that leads out of the hub's cache cannot be written with it
_FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


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
    """Verifier for lines of a JSONL file that name none, and for the rows of a data set."""
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
    hub: Annotated[str, Field(pattern=rf"^({_HUB_NAME}(/{_HUB_NAME})?)?$")] = ""
    """Data set of a hub, as ORG/NAME, where kind is dataset and `path` names no copy of it."""
    revision: Annotated[str, Field(pattern=rf"^({_HUB_NAME}(/{_HUB_NAME})*)?$", max_length=128)] = ""
    """Commit, branch or tag of it. A manifest holds the commit. Empty: the newest, which may change."""
    subset: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]{0,96}$")] = ""
    """Subset (configuration) of a data set that has several."""
    split: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    """Split of a data set to train on. Empty: train, or the only one."""
    held_out_split: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    """Split of a data set to hold out for evaluation. Empty: every tenth row of the other one."""
    columns: Annotated[dict[_FieldName, Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)] = (
        Field(default_factory=dict)
    )
    """Columns of a data set by field, such as {prompt = "question", answer = "solution"}; also inner ones, as in "info.question",
    and templates, as in "{a} + {b}"."""
    expected: Annotated[str, FINAL_ANSWERS] = "whole"
    """Which part of a data set's answer is the expected answer, such as boxed where it is a worked solution."""
    expected_parameters: dict[str, Any] = Field(default_factory=dict, max_length=16)
    """Parameters of that rule, such as {pattern = "#### (.+)"} of pattern."""
    skip_invalid: bool = False
    """Leave out rows of a data set that are no tasks, such as those with an empty answer, and log how many. False: an error."""
    tools: Annotated[tuple[ToolSection, ...], Field(max_length=8)] = ()
    """Tools that answers may call before the final one; see environments.md."""
    max_turns: Annotated[int, Field(ge=2, le=MAX_TURNS)] = 4
    """Most answers to one task where it has tools, the final one included."""

    @property
    def source_name(self) -> str:
        return self.label or self.name

    @property
    def form(self) -> dict[str, Any]:
        """The settings of prompts and final answers that differ from their defaults, as values of JSON."""
        return self.model_dump(mode="json", include=_FORM, exclude_defaults=True)

    @property
    def data_set(self) -> dict[str, Any]:
        """The settings of a data set that differ from their defaults, as values of JSON."""
        return self.model_dump(mode="json", include=_OF_DATA_SETS, exclude_defaults=True)

    @model_validator(mode="after")
    def _columns_belong_to_data_sets(self) -> "TaskSourceFacts":
        given = self.data_set
        if given and self.kind != "dataset":
            kind = f"kind {self.kind}" if "kind" in self.model_fields_set else f"no kind, which means {self.kind}"
            raise ValueError(
                f'{min(given)} belongs to dataset sources, got {kind}; set kind = "dataset" for source '
                f"{self.name!r}, or remove {min(given)}"
            )
        if self.revision and not self.hub:
            raise ValueError(f"revision belongs to hub, got no hub; set hub, or remove revision of {self.name!r}")
        return self

    @model_validator(mode="after")
    def _tools_are_unique(self) -> "TaskSourceFacts":
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"tools of a source must be different, got {names}; remove one of {self.source_name!r}")
        openings = [tool.marks[0] for tool in self.tools if tool.marks]
        if len(set(openings)) < len(openings):
            raise ValueError(
                f"marks of two tools must begin differently, got {openings} of {self.source_name!r}; change one"
            )
        return self

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
_OF_DATA_SETS = {
    "hub", "revision", "subset", "split", "held_out_split", "columns", "expected", "expected_parameters", "skip_invalid",
}  # fmt: skip


LOCAL_SETTINGS = {"path", "search_folder"}
"""Settings of a source that name places on this machine and are no part of a manifest."""


class TaskSourceSection(TaskSourceFacts):
    """One task source."""

    path: Path | None = None
    """JSONL file with one {"prompt", "answer", "verifier"?} object per line; code: {"prompt", "entry", "tests", "answer"};
    dataset: a file or folder, also in place of a download of `hub`; see data.md."""
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 that the rows of a data set must have. A manifest sets it; `swarm sample --show-prompt` prints it."""
    search_folder: Path | None = None
    """Folder of text files for the tool search. What it finds becomes part of rollouts, which others may read."""

    @model_validator(mode="after")
    def _path_matches_kind(self) -> "TaskSourceSection":
        if self.kind == "dataset" and self.path is None and not self.hub:
            raise ValueError(f"a dataset source needs a path or a hub, got none; set path for source {self.name!r}")
        if self.kind != "dataset" and self.sha256:
            raise ValueError(f"sha256 belongs to dataset sources, got kind {self.kind}; remove sha256 of {self.name!r}")
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


HELD_OUT_SHARE = 1 / 16
"""`held_out_share` of a new swarm."""
SMALLEST_HELD_OUT_SHARE = 1 / 64
"""Evaluation searches held-out prompts: of a smaller share, which a founder may choose, it would search for hours."""


class TasksSection(Section):
    """What the policy is trained on."""

    sources: Annotated[tuple[TaskSourceSection, ...], Field(min_length=1)] = DEMO_TASKS
    """Weighted mixture of task sources. All nodes of a swarm use the same list."""
    held_out_share: Annotated[float, Field(ge=0, le=0.25)] = HELD_OUT_SHARE
    """Share of all prompts, by their hash, that nobody trains on and evaluation alone uses, 1/64 or more; of a data set, the
    prompts of its held-out rows. All nodes of a swarm use the same. With 0, training may draw prompts of evaluation."""
    sandboxed: bool = False
    """Build and score tasks of reasoning-gym in a process that opens only files of installed packages, within bounds of time and
    memory, and allow only numbers and known words as parameters. Always true in a swarm with a manifest."""
    run_code_unsandboxed: bool = False
    """Run code of strangers even where no sandbox can be set up: it may then read your files, and outside Linux do more."""

    languages: dict[Annotated[str, Field(pattern=LANGUAGE)], LanguageSection] = Field(default_factory=dict)
    """Languages of code tasks beside the known ones, or in place of them, by name; see rewards.md."""
    allowed_languages: tuple[str, ...] = ()
    """Languages of code tasks, by name, that the manifest of a swarm may have run on this node."""
    judge: JudgeSection = JudgeSection()
    unsandboxed_rewards: tuple[str, ...] = ()
    """Reward functions that may read your files, start programs and use the network: those that packages offer by name, others
    as FILE.py:NAME or package.module:NAME, files of a manifest by their SHA-256; see rewards.md."""
    allowed_rewards: tuple[str, ...] = ()
    """Functions of installed packages, as package.module:NAME, that the manifest of a swarm may use as rewards on this node."""
    allowed_kinds: tuple[str, ...] = ()
    """Task sources of installed packages, by kind, that the manifest of a swarm may use on this node; see extending.md."""
    unsandboxed_kinds: tuple[str, ...] = ()
    """Task sources of packages, by kind, that may read your files, start programs and use the network; see extending.md."""
    reward_memory_mib: Annotated[int, Field(ge=64)] = 2048
    """Address space of one reward function of a package or of your own."""
    environment_processes: Annotated[int, Field(ge=1, le=64)] = 2
    """Processes for the episodes of each source of a package; one that computes or waits holds up those of its process."""
    max_data_gib: Annotated[float, Field(gt=0)] = 5.0
    """Largest download of all data sets together, and largest copy of their tasks; each has an equal share of it."""

    @model_validator(mode="before")
    @classmethod
    def _as_it_was_joined(cls, data: Any) -> Any:
        """Settings of a swarm that say nothing of held-out prompts come from a manifest that knew none."""
        if is_table(data) and data.get("sandboxed") and "held_out_share" not in data:
            return {**data, "held_out_share": 0.0}
        return data

    @model_validator(mode="after")
    def _held_out_prompts_can_be_found(self) -> "TasksSection":
        if 0 < self.held_out_share < SMALLEST_HELD_OUT_SHARE:
            raise ValueError(
                f"held_out_share must be 0 or in [1/64, 1/4], got {self.held_out_share:g}; set tasks.held_out_share = 0.0625"
            )
        return self

    @property
    def has_judge(self) -> bool:
        """Whether a language model takes part in the reward of a source."""
        return any(signal.is_judge for source in self.sources for signal in source.signals)

    @model_validator(mode="after")
    def _packages_are_allowed(self) -> "TasksSection":
        """A manifest must not choose which of the installed packages is imported."""
        kinds = {source.kind for source in self.sources if not TASK_SOURCES.is_built_in(source.kind)}
        if self.sandboxed and (refused := sorted(kinds - {*self.allowed_kinds, *self.unsandboxed_kinds})):
            raise ValueError(
                f"a manifest may use a task source of a package only where you allow it, got {', '.join(refused)}; set "
                f"tasks.allowed_kinds = {refused} if you trust the package"
            )
        languages = {
            str(one.parameters["language"])
            for one in self.sources
            if one.parameters.get("language") and one.kind == "code"
        }
        if self.sandboxed and (refused := sorted(languages - {*self.allowed_languages})):
            raise ValueError(
                f"a manifest may have programs of a language run only where you allow it, got {', '.join(refused)}; set "
                f"tasks.allowed_languages = {refused} to run them in the sandbox"
            )
        signals = [signal for source in self.sources for signal in source.signals]
        functions = {one.function for one in signals if one.function and not one.is_of_file}
        if self.sandboxed and (refused := sorted(functions - {*self.allowed_rewards, *self.unsandboxed_rewards})):
            raise ValueError(
                f"a manifest may use a function of a package as a reward only where you allow it, got {', '.join(refused)}; set "
                f"tasks.allowed_rewards = {refused} if you trust the package"
            )
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> "TasksSection":
        names = [source.source_name for source in self.sources]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"source names must be unique, got {doubled} twice; set a different label")
        return self


class WarmStartSection(Section):
    """What the policy begins with before RL. It is part of the policy's lineage."""

    adapter: Path | None = None
    """Folder with a LoRA adapter in peft format, of the same base, rank and layers. Unset: a fresh adapter."""
    adapter_hub: Annotated[str, Field(pattern=rf"^({_HUB_NAME}(/{_HUB_NAME})?)?$")] = ""
    """Such an adapter on a hub, as ORG/NAME, in place of `adapter`. It is fetched once, within policy.max_download_gib."""
    adapter_revision: Annotated[str, Field(pattern=rf"^({_HUB_NAME}(/{_HUB_NAME})*)?$", max_length=128)] = ""
    """Commit, branch or tag of `adapter_hub`; nodes that merge need the same commit. Empty: the newest at the first start."""
    steps: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Supervised steps on right answers; 0 is off. They count as policy versions."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """Examples per step."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate of these steps; it rises for 10 steps and then falls to 0."""
    sources: tuple[TaskSourceSection, ...] = ()
    """Task sources or data sets whose right answers are the examples. Empty: tasks.sources."""

    @model_validator(mode="after")
    def _one_adapter(self) -> "WarmStartSection":
        if self.adapter is not None and self.adapter_hub:
            raise ValueError(f"adapter and adapter_hub must not both be set, got {self.adapter_hub}; remove one")
        if self.adapter_revision and not self.adapter_hub:
            raise ValueError(f"adapter_revision belongs to adapter_hub, got {self.adapter_revision}; set adapter_hub")
        return self
