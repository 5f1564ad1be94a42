"""How sources ask: system prompt, examples and arguments through the chat template, and the template of the user's text."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from swarm.cli.policy.show_prompts import show_prompts
from swarm.config import Config, TaskSourceSection, TasksSection, dump_toml, parse
from swarm.errors import ConfigError, ManifestError, PolicyError, TaskError
from swarm.manifest.manifest import changed, changes, create, dump
from swarm.manifest.manifest import parse as parse_manifest
from swarm.policy.base_folder import BUNDLED_FOLDER, max_positions
from swarm.policy.base_model import folder_eos_ids
from swarm.policy.policy import Policy
from swarm.policy.prompts.chat_template import PromptFrame, prompt_frames
from swarm.policy.prompts.prompt_encoder import PromptEncoder
from swarm.records.identity import Identity
from swarm.rollouts.prompt_check import check_prompts
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import TaskFailure, score
from swarm.types import PLAIN, PromptContext
from tests.unit.test_chat_template import LLAMA, QWEN, Tokenizer, frame

FORM: dict[str, Any] = {
    "system": "Think first.",
    "examples": [{"prompt": "1 + 1?", "answer": "<answer>2</answer>"}],
    "template_arguments": {"enable_thinking": False, "level": 2, "date": "26 Jul 2024"},
    "prompt_template": "{prompt}\nEnd with \\boxed{}.",
    "answer": "tag",
}
THINKING = (
    QWEN + "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}"
)


def context(**settings: Any) -> PromptContext:
    from swarm.tasks.prompted_source import prompt_context

    return prompt_context(TaskSourceSection.model_validate({"name": "gcd", **settings}))


def sources_of(*sections: dict[str, Any], **more: Any) -> TaskMixture:
    return TaskMixture(TasksSection.model_validate({"sources": sections, **more}))


# --- through the chat template


def test_system_examples_and_arguments_are_written_by_the_template() -> None:
    asked = context(**{key: FORM[key] for key in ("system", "examples", "template_arguments")})
    begin = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>system\nThink first.<|im_end|>\n"
    shots = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<answer>2</answer><|im_end|>\n"
    end = "<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert frame(THINKING, asked) == PromptFrame(f"{begin}{shots}<|im_start|>user\n", end, strips=False)
    trimmed = frame(LLAMA, context(system=" Hi.\n"))
    assert trimmed == PromptFrame("<s>[system]Hi.[user]", "", strips=True)


def test_a_system_prompt_with_the_words_of_a_probe_is_no_prompt() -> None:
    found = frame(QWEN, context(system="What is 3 + 4?"))
    assert found is not None and found.before.endswith("What is 3 + 4?<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("template", "settings", "told"),
    [
        ("{{ messages[-1].content }}", {"system": "Hi"}, "write system"),
        (
            "{% for m in messages %}{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}{% endfor %}",
            {"examples": [{"prompt": "a", "answer": "<think>b</think>c"}]},
            r"write examples\[0\].answer",
        ),
        (
            "{% for m in messages|reverse %}{{ m.content }}{% endfor %}",
            {"examples": [{"prompt": "a", "answer": "b"}]},
            r"write examples|changes prompts",
        ),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[-1].content }}",
            {"system": "Hi"},
            "no system role",
        ),
        (QWEN + "{% if loud %}{{ messages[-1].content }}{% endif %}", {"template_arguments": {"loud": True}}, "changes"),
        ("", {"system": "Hi"}, "got a base without one"),
    ],
)  # fmt: skip
def test_a_context_that_the_template_does_not_show_is_refused(
    template: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(PolicyError, match=told):
        frame(template, context(**settings))


def test_several_contexts_are_rendered_by_one_process_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm.policy.prompts import chat_template

    asked = [context(system=f"Be {number}.") for number in range(3)]
    frames = prompt_frames(Tokenizer(QWEN + " "), [(one, None) for one in asked], is_own=False)
    assert [frames[one, None] is not None and one.system in frames[one, None].before for one in asked] == [True] * 3  # type: ignore[union-attr]
    monkeypatch.setattr(chat_template, "_SERVICE", "no.such.module")
    assert prompt_frames(Tokenizer(QWEN + " "), [(one, None) for one in asked[:2]], is_own=False) == {
        (one, None): frames[one, None] for one in asked[:2]
    }


def test_an_argument_that_the_base_does_not_use_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert frame(LLAMA, context(template_arguments={"enable_thinkin": False})) == frame(LLAMA)
    assert "does not use enable_thinkin of template_arguments" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"self": 1}, "must not replace what the rendering itself sets, got self"),
        ({"messages": 1}, "must not replace what the rendering itself sets, got messages"),
        ({"eos_token": "x"}, "must not replace what the rendering itself sets, got eos_token"),
        ({"a-b": 1}, "have names of letters"),
        ({"a": "<|im_end|>"}, "words of <= 32"),
        ({"a": "x" * 33}, "words of <= 32"),
        ({"a": [1]}, "got a = list"),
        ({"a": float("nan")}, "got a = nan"),
        ({"a": 10**13}, "got a = int"),
    ],
)
def test_arguments_are_booleans_numbers_and_words(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"tasks": {"sources": [{"name": "gcd", "template_arguments": arguments}]}})
    assert told in str(caught.value) and "'gcd'" in str(caught.value)


def test_no_name_of_an_argument_reaches_the_library(prompts: PromptEncoder) -> None:
    """The template of this package is rendered in the node itself."""
    names = (
        "tokenize",
        "padding",
        "truncation",
        "return_tensors",
        "tokenizer_kwargs",
        "conversation",
        "raise_exception",
        "loop",
    )
    asked = context(template_arguments=dict.fromkeys(names, True))
    assert prompts.render("2 + 2?", asked) == prompts.render("2 + 2?")
    with pytest.raises(PolicyError, match=r"one that fails: UndefinedError|one that fails: TypeError"):
        prompt_frames(BrokenBySystem(), [(context(system="x"), None)], is_own=True)


class BrokenBySystem(Tokenizer):
    """A tokenizer whose template fails over a system prompt."""

    def __init__(self) -> None:
        super().__init__(
            "{% if messages[0].role == 'system' %}{{ nothing.at.all }}{% endif %}{{ messages[-1].content }}"
        )


def test_true_and_one_are_two_contexts() -> None:
    assert context(template_arguments={"a": True}) != context(template_arguments={"a": 1})


# --- the user's text


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        ("{prompt}", "{a} {prompt}"),
        ("Say \\boxed{} of {prompt}.", "Say \\boxed{} of {a} {prompt}."),
        ("{{prompt}} { prompt } {prompt}{", "{prompt} { prompt } {a} {prompt}{"),
        ("{level}/{topic}: {prompt}", "3/sets: {a} {prompt}"),
    ],
)
def test_fields_are_replaced_once_and_other_braces_stay(tmp_path: Path, template: str, asked: str) -> None:
    line = {"prompt": "{a} {prompt}", "answer": "7"}
    if "level" in template:
        line |= {"level": 3, "topic": "sets"}
    (tmp_path / "t").write_text("\n".join([json.dumps(line)] * 3))
    section = {"kind": "jsonl", "name": "mine", "path": tmp_path / "t", "prompt_template": template}
    assert sources_of(section).sources["mine"].task(16, 0).prompt == asked


def test_a_file_without_prompts_is_asked_by_its_own_fields(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("\n".join([json.dumps({"question": "2 + 2?", "answer": 4})] * 3))
    section = {"kind": "jsonl", "name": "mine", "path": tmp_path / "t", "prompt_template": "Q: {question}"}
    task = sources_of(section).sources["mine"].task(16, 0)
    assert task.prompt == "Q: 2 + 2?" and score(task, "4") == 1.0


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"name": "gcd", "prompt_template": "{promt}"}, "task (prompt, question), got {promt}; correct it, or write {{promt}}"),
        ({"name": "gcd", "prompt_template": "\\boxed{}"}, "must name a field"),
        ({"name": "gcd", "prompt_template": "{prompt} {answer}"}, "fields that a policy may see, got {answer}"),
        ({"kind": "code", "name": "list_functions", "prompt_template": "{question}"}, "(entry, prompt), got {question}"),
        ({"kind": "jsonl", "name": "mine", "prompt_template": "{prompt} {level}"}, "got no 'level' in"),
        ({"kind": "jsonl", "name": "mine", "prompt_template": "{prompt} {tags}"}, "got no 'tags' in"),
        ({"kind": "jsonl", "name": "mine", "prompt_template": "{prompt}" * 14}, "at most 65536 characters"),
        ({"kind": "jsonl", "name": "mine"}, "only, got ['tags']"),
    ],
)  # fmt: skip
def test_a_template_that_a_task_cannot_fill_is_refused(tmp_path: Path, section: dict[str, Any], told: str) -> None:
    if section.get("kind") == "jsonl":
        line = {"prompt": "p" * 5000, "answer": "7", "tags": ["a"]}
        (tmp_path / "t").write_text("\n".join([json.dumps(line)] * 3))
        section = section | {"path": tmp_path / "t"}
    with pytest.raises(TaskError) as caught:
        sources_of(section)
    assert told in str(caught.value)


def test_a_prompt_that_its_template_makes_too_long_costs_its_task() -> None:
    source = sources_of({"name": "gcd", "prompt_template": "{prompt}" * 2000}).sources["gcd"]
    with pytest.raises(TaskFailure, match="at most 65536 characters"):
        source.task(16, 0)


# --- digests and manifests


SIGNALS = [
    {"name": "correct", "weight": 8},
    {"name": "format", "parameters": {"tags": ["answer"]}},
    {"name": "length", "parameters": {"max_chars": 400, "buffer_chars": 100}},
]


@pytest.mark.parametrize(
    ("section", "digest"),
    [
        ({"name": "gcd"}, "44d78352b28df24a"),
        ({"name": "gcd", "parameters": {"min_value": 2}, "signals": SIGNALS}, "70147358a700d434"),
        ({"kind": "jsonl", "name": "mine", "verifier": "numeric"}, "12f045e3e5aa317a"),
        ({"kind": "jsonl", "name": "mine", "signals": SIGNALS}, "9017538e15a72317"),
        ({"kind": "code", "name": "list_functions"}, "6d68378abf301bfe"),
    ],
)
def test_digests_of_sources_without_these_settings_are_those_of_earlier_versions(
    tmp_path: Path, section: dict[str, Any], digest: str
) -> None:
    if section.get("kind") == "jsonl":
        section = section | {"path": tmp_path / "t"}
        section["path"].write_text("\n".join([json.dumps({"prompt": "p", "answer": "7"})] * 3))
    (source,) = sources_of(section, run_code_unsandboxed=True).sources.values()
    assert source.config_digest == digest


def test_a_source_as_it_was_keeps_its_digest_and_each_new_setting_changes_it() -> None:
    plain = sources_of({"name": "gcd"}).sources["gcd"].config_digest
    assert plain == sources_of({"name": "gcd", "answer": "whole", "examples": []}).sources["gcd"].config_digest
    found = [sources_of({"name": "gcd", key: value}).sources["gcd"].config_digest for key, value in FORM.items()]
    found.append(sources_of({"name": "gcd", **FORM}).sources["gcd"].config_digest)
    assert len({plain, *found}) == len(FORM) + 2
    again = sources_of({"name": "gcd", **FORM}, sandboxed=True).sources["gcd"]
    assert again.config_digest == found[-1], "the same in a sandboxed process"
    task = again.task(16, 0)
    assert task.context == context(**FORM) and task.prompt.endswith("\nEnd with \\boxed{}.")


def test_a_manifest_carries_them_and_leaves_out_what_is_as_it_was() -> None:
    identity = Identity(b"f" * 32)
    known = create(identity, "ours", 1, 1e9, tasks=[{"name": "gcd"}])
    text = dump(known, identity)
    assert not any(key in text for key in ("answer", "system", "examples", "template"))
    long = "Be kind. " * 1000
    later = changed(known, tasks=[{"name": "gcd", **FORM, "system": long}])
    read = parse_manifest(dump(later, identity).encode())
    assert read.tasks[0].form == {**FORM, "system": long} and read == later
    assert type(read.tasks[0].template_arguments["enable_thinking"]) is bool
    (line,) = changes(known, later)
    assert 'answer "tag"' in line and "(9002 characters, SHA-256 " in line and "enable_thinking" in line
    other = changed(known, tasks=[{"name": "gcd", **FORM, "system": long + "!"}])
    assert changes(later, other) and len(line) < 1200


@pytest.mark.parametrize(
    "settings",
    [
        {"system": "x" * 32_769},
        {"examples": [{"prompt": "x" * 2000, "answer": "y"}] * 20},
        {"examples": [{"prompt": "x", "answer": "y"}] * 33},
        {"examples": [{"prompt": "x"}]},
        {"template_arguments": {"a": "{{ x }}"}},
        {"template_arguments": {f"a{number}": 1 for number in range(17)}},
        {"prompt_template": "x" * 32_769},
    ],
)
def test_a_founder_cannot_set_what_is_too_large_or_no_word(settings: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        create(Identity(b"f" * 32), "ours", 1, 1e9, tasks=[{"name": "gcd", **settings}])


def test_the_resolved_configuration_keeps_them(tmp_path: Path) -> None:
    from swarm.config import load

    config = parse({"tasks": {"sources": [{"name": "gcd", **FORM}]}})
    (tmp_path / "c.toml").write_text(dump_toml(config))
    assert load([tmp_path / "c.toml"]) == config


# --- before the first rollout


@pytest.fixture
def prompts() -> PromptEncoder:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED_FOLDER)
    return PromptEncoder(tokenizer, folder_eos_ids(BUNDLED_FOLDER, tokenizer), is_own=True)


def config_of(**settings: Any) -> Config:
    rollouts = {key: settings.pop(key) for key in ("max_new_tokens",) if key in settings}
    policy = {key: settings.pop(key) for key in ("max_prompt_tokens",) if key in settings}
    return parse({"policy": policy, "rollouts": rollouts, "tasks": {"sources": [{"name": "gcd", **settings}]}})


def check(prompts: PromptEncoder, **settings: Any) -> None:
    config = config_of(**settings)
    check_prompts(config, TaskMixture(config.tasks), prompts, BUNDLED_FOLDER)


def test_prompts_that_do_not_fit_are_reported_before_the_first_rollout(prompts: PromptEncoder) -> None:
    assert max_positions(BUNDLED_FOLDER) == 512
    check(prompts, system="Be kind.")
    with pytest.raises(
        ConfigError, match=r"fit into the 512 positions .* beside rollouts.max_new_tokens = 24, got \d{3}"
    ):
        check(prompts, system="7 " * 600)
    with pytest.raises(ConfigError, match=r"max_prompt_tokens must leave room for a task .* got 100"):
        check(prompts, system="7 " * 120, max_prompt_tokens=100)
    with pytest.raises(ConfigError, match=r"fit into the 512 positions .* rollouts.max_new_tokens = 510; lower it"):
        check(prompts, max_new_tokens=510)
    with pytest.raises(PolicyError, match=r"tasks.sources.system of 'gcd' must have no special token .* '<|answer|>'"):
        check(prompts, system="Bye.<|answer|>")
    with pytest.raises(PolicyError, match=r"tasks.sources.examples of 'gcd'"):
        check(prompts, examples=[{"prompt": "a<|answer|>", "answer": "b"}])


def test_positions_are_those_that_the_model_says(tmp_path: Path) -> None:
    for settings, expected in (
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"factor": 8, "original_max_position_embeddings": 8}},
            64,
        ),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": float("inf")}}, None),
        ([], None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        assert max_positions(tmp_path) == expected


def test_a_mark_that_decoding_drops_is_reported(prompts: PromptEncoder) -> None:
    check(prompts, answer="tag")
    prompts.tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    with pytest.raises(PolicyError, match="got </think>, which the tokenizer"):
        check(prompts, answer="after_think")


def test_prompts_have_the_tokens_of_the_rendered_text(make_policy: Callable[..., Policy]) -> None:
    policy = make_policy("qwen2")
    asked = context(system="Be kind.", examples=FORM["examples"])
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<answer>2</answer>"},
        {"role": "user", "content": "2 + 2?"},
    ]
    ids = policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert policy.encode_prompt("2 + 2?", asked) == list(ids) != policy.encode_prompt("2 + 2?", PLAIN)


def test_the_rendered_prompts_are_printed(tmp_path: Path) -> None:
    settings = {**FORM, "template_arguments": {}, "system": "Be\x1b[31m kind."}
    with (tmp_path / "shown").open("w+") as stream:
        show_prompts(config_of(**settings), BUNDLED_FOLDER, stream)
        stream.seek(0)
        shown = stream.read()
    assert "── gcd: " in shown and " tokens (at most 512" in shown and "answer: tag" in shown
    assert "Be\\x1b[31m kind.1 + 1?<answer>2</answer>" in shown and "\\boxed{}.<|answer|>" in shown
