"""A base's chat template is a program of strangers: it is run once, within bounds, and only its text around a prompt is used."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from transformers import PreTrainedTokenizerFast

from swarm.config import PolicySection
from swarm.errors import PolicyError
from swarm.policy.base_folder import BUNDLED_FOLDER
from swarm.policy.policy import Policy, load_policy
from swarm.policy.prompts import chat_template
from swarm.policy.prompts.chat_template import PromptFrame, prompt_frames
from swarm.types import PLAIN, PromptContext

CONTENT = "{{ messages[0]['content'] }}"
QWEN = (
    "{%- if tools %}{{- 'tools' }}{%- else %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}"
    "{%- set ns = namespace(last=messages|length - 1) %}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA = "{{- bos_token }}{%- for one in messages %}{{- '[' + one['role'] + ']' + one['content'] | trim }}{%- endfor %}"


class Tokenizer:
    """What `prompt_frames` needs of one."""

    special_tokens_map: ClassVar = {"bos_token": "<s>"}

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self) -> str:
        return self.chat_template


def frame(template: str, context: PromptContext = PLAIN) -> PromptFrame | None:
    return prompt_frames(Tokenizer(template), [(context, None)], is_own=False)[context, None]


def test_ordinary_templates_are_the_text_around_a_prompt() -> None:
    before = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"
    assert frame(QWEN) == PromptFrame(before, "<|im_end|>\n<|im_start|>assistant\n", strips=False)
    trimmed = PromptFrame("<s>[user]", "", strips=True)
    assert frame(LLAMA) == trimmed
    assert trimmed.around(" 1 + 1 \n") == "<s>[user]1 + 1"
    assert frame("") is None


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            f"{{% for a in range(99999) %}}{{% for b in range(99999) %}}{{% endfor %}}{{% endfor %}}{CONTENT}",
            "does not end",
        ),
        (
            "{% set ns = namespace(x='a') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}" + CONTENT,
            r"MemoryError|does not end",  # filling the memory takes time, too
        ),
        ("{{" + "(" * 200_000, "RecursionError"),
        ("{% if messages[0].content|length > 999 %}{{ 'y' * 9999 }}{% endif %}" + CONTENT, "changes prompts"),
    ],
)
def test_a_template_that_is_endless_giant_or_depends_on_the_prompt_is_refused(
    monkeypatch: pytest.MonkeyPatch, template: str, told: str
) -> None:
    monkeypatch.setattr(chat_template, "TIME_BUDGET_S", 1.0 if "does not end" in told else 60.0)
    with pytest.raises(PolicyError, match=told):
        frame(template)


ESCAPED = """
import ctypes, os, jinja2.sandbox

def seen():
    library = ctypes.CDLL(None)
    refused = [library.socket(1, 1, 0) < 0, library.fork() < 0]
    return [os.getpid() == 1, *refused, not os.path.exists("/proc"), not os.environ.get("HOME")]

jinja2.sandbox.ImmutableSandboxedEnvironment.is_safe_attribute = lambda *_: True
jinja2.sandbox.ImmutableSandboxedEnvironment.is_safe_callable = lambda *_: True
real = jinja2.sandbox.ImmutableSandboxedEnvironment.__init__
def init(self, *arguments, **options):
    real(self, *arguments, **options)
    self.globals["seen"] = seen
jinja2.sandbox.ImmutableSandboxedEnvironment.__init__ = init
"""


def test_a_template_that_escapes_from_its_language_finds_no_network_no_process_and_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole in the template language is played by a module that the process imports first."""
    (tmp_path / "escaped_service.py").write_text(
        ESCAPED
        + "from swarm.policy.prompts.template_process import start as begin\ndef start(opening):\n    return begin(opening)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(chat_template, "_SERVICE", "escaped_service")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert frame("{{ seen() }}|" + CONTENT) == PromptFrame("[True, True, True, True, True]|", "", strips=False)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ({"tool": "hi"}, "several, none of them the default"),
        ({"default": 7}, "one that is int"),
        (7, "one that is int"),
    ],
)
def test_what_is_no_template_is_refused(template: object, told: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED_FOLDER)
    tokenizer.chat_template = template
    with pytest.raises(PolicyError, match=told):
        prompt_frames(tokenizer, is_own=False)


@pytest.mark.parametrize("kind", ["qwen2", "bundled"])
def test_prompts_have_the_tokens_that_the_library_gives_them(make_policy: Callable[..., Policy], kind: str) -> None:
    policy = load_policy(PolicySection(), device="cpu") if kind == "bundled" else make_policy(kind)
    for text in ("1 + 1 =", " two  spaces\n", "<|answer|> x"):
        chat = [{"role": "user", "content": text}]
        ids = policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert policy.encode_prompt(text) == list(ids)
