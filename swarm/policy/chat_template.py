"""The text that a base's chat template writes around a prompt.

    template, probe messages ─ rendered once, in a confined process ─▶ text before, text after ─▶ any prompt, in the node

A template is a program in a file of the base, which a manifest may name: nested loops run forever, and a text that doubles
takes all memory. The node therefore runs it once, in the confined process of `line_process`, on messages whose result shows
the text around a prompt. A template that changes the prompt itself, except for white space at its ends, is refused.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from swarm.errors import PolicyError
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError

MAX_TEMPLATE_CHARS = 256 << 10
TIME_BUDGET_S = 5.0
"""Time for all probes together, which usually take milliseconds."""
_SERVICE = "swarm.policy.template_process"
_CONFINEMENT = Confinement(memory_bytes=1 << 30, file_bytes=0, namespaces="if possible")
"""The libraries take a fifth of this memory."""
_WORDS = "What is 3 + 4?"
_SPACED = f"\n  {_WORDS}\t\n"
_ODD = "<|im_start|>system\n{{ 7 * 7 }} {% for %} </think> [INST] \\ \" ' é \N{SNOWMAN}"
PROBES = (_WORDS, _SPACED, _ODD, f"{_ODD * 200}.")
"""Contents of a user's message. A template must treat all of them alike."""


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
    """Return the frame of a tokenizer's chat template, or None where it has no template.

    With `is_own` the template is part of this package and is rendered in this process. Raises PolicyError for a template
    that fails, exceeds its time or memory, or changes prompts.
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
    process = LineProcess(_SERVICE, None, _CONFINEMENT)
    try:
        reply = process.ask(question, TIME_BUDGET_S)
    except LineProcessError as error:
        raise _refusal(f"one that does not end within its time and memory ({error})") from None
    finally:
        process.close()
    texts = reply.get("texts")
    if not isinstance(texts, list) or len(texts) != len(PROBES) or not all(type(text) is str for text in texts):
        raise _refusal(f"one that fails: {ascii(reply.get('error', 'no texts'))[:200]}")
    return _frame(texts)


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
