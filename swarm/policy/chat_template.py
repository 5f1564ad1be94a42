"""What a base's chat template writes around a prompt.

    template, prompt of a user ─ rendered once, in a bounded process ─▶ text before, text after ─▶ any prompt, in the node

A template is a program in a file of the base, which a manifest may name: nested loops run for ever, and a text that doubles
takes all memory. So the node runs it once, where its time, memory and files are bounded, on messages whose result shows what
stands around a prompt. A template that changes the prompt itself by anything but stripping white space is refused.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from swarm.child_python import module_command
from swarm.errors import PolicyError

MAX_TEMPLATE_CHARS = 256 << 10
TIME_BUDGET_S = 60.0
"""For the whole process; most of it is the import of transformers. The template itself gets `template_process.CPU_S`."""
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_WORDS = "What is 3 + 4?"
_SPACED = f"\n  {_WORDS}\t\n"
_ODD = "<|im_start|>system\n{{ 7 * 7 }} {% for %} </think> [INST] \\ \" ' é \N{SNOWMAN}"
PROBES = (_WORDS, _SPACED, _ODD, f"{_ODD * 200}.")
"""Contents of a user's message. Only a template that treats all of them alike is taken."""


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """The text around a prompt."""

    before: str
    after: str
    strips: bool
    """Whether white space at both ends of the prompt is removed."""

    def around(self, prompt: str) -> str:
        return f"{self.before}{prompt.strip() if self.strips else prompt}{self.after}"


def prompt_frame(tokenizer: Any, *, is_own: bool) -> PromptFrame | None:
    """The frame of a tokenizer's chat template, None where it has no template.

    `is_own`: the template is of this package, and is rendered here. Raises PolicyError for one that fails, takes too long or
    too much, or changes prompts.
    """
    if not tokenizer.chat_template:
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise _refusal("several, none of them the default") from None
    if not isinstance(template, str):
        raise _refusal(f"one that is {type(template).__name__} and not text")
    if is_own:
        return _frame(
            [tokenizer.apply_chat_template(_chat(text), add_generation_prompt=True, tokenize=False) for text in PROBES]
        )
    return _foreign_frame(template, json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str))


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@lru_cache(maxsize=16)
def _foreign_frame(template: str, special_tokens: str) -> PromptFrame:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise _refusal(f"one of {len(template)} characters, with at most {MAX_TEMPLATE_CHARS} allowed")
    question = {
        "template": template,
        "special_tokens": json.loads(special_tokens),
        "chats": [_chat(one) for one in PROBES],
    }
    with tempfile.TemporaryFile() as output:
        try:
            subprocess.run(
                module_command("swarm.policy.template_process"),
                input=json.dumps(question).encode(),
                stdout=output,
                stderr=subprocess.DEVNULL,
                env={**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                timeout=TIME_BUDGET_S,
                check=True,
                start_new_session=True,
            )
            output.seek(0)
            reply = json.loads(output.read())
        except (subprocess.SubprocessError, ValueError) as error:
            raise _refusal(f"one that does not end within its time and memory ({type(error).__name__})") from None
    if "error" in reply:
        raise _refusal(f"one that fails: {ascii(reply['error'])[:200]}")
    return _frame(reply["texts"])


def _frame(texts: list[str]) -> PromptFrame:
    before, found, after = texts[0].partition(_WORDS)
    for strips in (False, True):
        frame = PromptFrame(before, after, strips)
        if found and [frame.around(one) for one in PROBES] == texts:
            return frame
    raise _refusal("one that changes prompts")


def _refusal(found: str) -> PolicyError:
    return PolicyError(
        "policy.base must have a chat template that writes a user's message as it is, between texts that stay the same, got "
        f"{found}; take another base, or remove the template from a copy of it"
    )
