"""The text that a base's chat template writes around a prompt.

    template, context, probe messages ─ rendered once, in a confined process ─▶ text before, text after ─▶ any prompt, in the node

A template is a program in a file of the base, which a manifest may name: nested loops run forever, and a text that doubles
takes all memory. The node therefore runs it once per context (system prompt, examples, arguments), in the confined process of
`line_process`, on messages whose result shows the text around a prompt. A template that changes the prompt itself, except for
white space at its ends, is refused, and so is one that leaves out a part of the context.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm.errors import PolicyError
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.types import PLAIN, PromptContext, Role

logger = logging.getLogger(__name__)

MAX_TEMPLATE_CHARS = 256 << 10
TIME_BUDGET_S = 5.0
"""Time for all probes of one context together, which usually take milliseconds."""
_SERVICE = "swarm.policy.prompts.template_process"
_CONFINEMENT = Confinement(memory_bytes=1 << 30, file_bytes=0, namespaces="if possible")
"""The libraries take a fifth of this memory."""
_WORDS = "What is 3 + 4?"
_SPACED = f"\n  {_WORDS}\t\n"
_ODD = "<|im_start|>system\n{{ 7 * 7 }} {% for %} </think> [INST] \\ \" ' é \N{SNOWMAN}"
PROBES = (_WORDS, _SPACED, _ODD, f"{_ODD * 200}.")
"""Contents of a user's message. A template must treat all of them alike."""
_ANSWERED = "I have answered 7."
"""What the assistant says before an environment replies."""

Place = tuple[PromptContext, Role | None]
"""A context, and as whom an environment replies to an answer; None where the prompt begins the chat."""


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """The text around a prompt."""

    before: str
    after: str
    strips: bool
    """Whether white space at both ends of the prompt is removed."""

    def around(self, prompt: str) -> str:
        return f"{self.before}{prompt.strip() if self.strips else prompt}{self.after}"


_MAX_KNOWN_FRAMES = 256
_known_frames: dict[tuple[str, str, Place], PromptFrame] = {}
"""By template, special tokens and place. Starting the process takes longer than all else."""


def prompt_frames(
    tokenizer: Any, places: Sequence[Place] = ((PLAIN, None),), *, is_own: bool
) -> dict[Place, PromptFrame | None]:
    """Return the frame of a tokenizer's chat template for each place; None where it has no template.

    The frame of a reply begins where the assistant's answer ends, usually with the text of EOS.

    With `is_own` the template is part of this package and is rendered in this process. Raises PolicyError for a template
    that fails, exceeds its time or memory, or changes prompts; for a context that it does not show; and for any context but
    the plain one where there is no template.
    """
    if not tokenizer.chat_template:
        if any(replace(context, tools="") != PLAIN for context, _ in places):
            raise PolicyError(
                "policy.base must have a chat template for system, examples and template_arguments of a task source, got a "
                "base without one; write the text into prompt_template, or take another base"
            )
        return dict.fromkeys(places)
    template = _template(tokenizer)
    for context, _ in places:
        _report_unused(template, context)
    if is_own:
        return {
            place: _frame(_rendered(tokenizer, template, _chats(place, template), place[0]), place) for place in places
        }
    return _foreign_frames(template, tokenizer.special_tokens_map, places)


class ConversationRenderer:
    """Renders whole conversations with a tokenizer's chat template, in one confined process that stays.

    It differs from a frame in that nothing is known of the messages before. Safe from any thread: one renders at a time.
    """

    def __init__(self, tokenizer: Any, *, is_own: bool) -> None:
        """`is_own`: the template is part of this package, and needs no process. Raises PolicyError as `prompt_frames`."""
        self._tokenizer = tokenizer
        self._is_own = is_own
        self._template = _template(tokenizer)
        if len(self._template) > MAX_TEMPLATE_CHARS:
            raise _refusal(f"one of {len(self._template)} characters, with at most {MAX_TEMPLATE_CHARS} allowed")
        self._process = LineProcess(_SERVICE, None, _CONFINEMENT)

    def render(self, messages: Sequence[Mapping[str, str]], arguments: str = "") -> str:
        """Return the text that the next answer follows. `arguments`: those of a PromptContext.

        Raises PolicyError where the template refuses the conversation, or exceeds its time or memory.
        """
        context = PromptContext(arguments=arguments)
        chats = [[dict(message) for message in messages]]
        if self._is_own:
            return _rendered(self._tokenizer, self._template, chats, context)[0]
        tokens = json.loads(json.dumps(self._tokenizer.special_tokens_map, default=str))
        question = {"template": self._template, "special_tokens": tokens, "chats": chats, "tools": None}
        try:
            reply = self._process.ask({**question, "arguments": _arguments(context)}, TIME_BUDGET_S)
        except LineProcessError as error:
            raise PolicyError(
                f"the chat template must render the conversation within its time and memory, got {error}; shorten it"
            ) from None
        texts = reply.get("texts")
        if not isinstance(texts, list) or len(texts) != 1 or type(texts[0]) is not str:
            told = ascii(reply.get("error", "no text"))[:200]
            raise PolicyError(f"the chat template must accept the conversation, got {told}; change its messages")
        return texts[0]

    def close(self) -> None:
        self._process.close()


def _template(tokenizer: Any) -> str:
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise _refusal("several, none of them the default") from None
    if not isinstance(template, str):
        raise _refusal(f"one that is {type(template).__name__} and not text")
    return template


def tools_as_text(tools: str) -> str:
    """What a policy reads whose chat template knows no tools."""
    functions = [one["function"] for one in json.loads(tools)]
    lines = [f"- {one['name']}: {one['description']}" for one in functions]
    return "\n".join(["To call a tool, write <tool>its name: a text</tool> and nothing after it. Tools:", *lines])


def _knows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _chats(place: Place, template: str) -> list[list[dict[str, str]]]:
    context, role = place
    tools = "" if _knows_tools(template) or not context.tools else tools_as_text(context.tools)
    system = "\n\n".join(filter(None, (context.system, tools)))
    begin = [{"role": "system", "content": system}] if system else []
    for prompt, answer in context.examples:
        begin += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if role is not None:
        begin += [{"role": "user", "content": _WORDS}, {"role": "assistant", "content": _ANSWERED}]
    return [[*begin, {"role": role or "user", "content": probe}] for probe in PROBES]


def _arguments(context: PromptContext) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(context.arguments or "{}")
    return found


def _rendered(tokenizer: Any, template: str, chats: list[list[dict[str, str]]], context: PromptContext) -> list[str]:
    """Render chats in this process."""
    from transformers.utils.chat_template_utils import render_jinja_template

    values = {**_arguments(context), **tokenizer.special_tokens_map}
    tools = json.loads(context.tools) if context.tools and _knows_tools(template) else None
    try:
        rendered: Any = render_jinja_template(  # (texts, places of the assistant's parts)
            chats, tools=tools, chat_template=template, add_generation_prompt=True, **values
        )
    except Exception as error:  # an argument may be one that the template cannot use
        raise _refusal(f"one that fails: {type(error).__name__}: {str(error)[:200]!a}", context) from None
    return list(rendered[0])


def _foreign_frames(
    template: str, special_tokens: Mapping[str, Any], places: Sequence[Place]
) -> dict[Place, PromptFrame | None]:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise _refusal(f"one of {len(template)} characters, with at most {MAX_TEMPLATE_CHARS} allowed")
    tokens = json.dumps(special_tokens, sort_keys=True, default=str)
    process = LineProcess(_SERVICE, None, _CONFINEMENT)
    try:
        for place in places:
            if (template, tokens, place) not in _known_frames:
                _known_frames[template, tokens, place] = _frame(_ask(process, template, tokens, place), place)
        frames = {place: _known_frames[template, tokens, place] for place in places}
    finally:
        process.close()
    while len(_known_frames) > _MAX_KNOWN_FRAMES:
        _known_frames.pop(next(iter(_known_frames)), None)
    return dict(frames)


def _ask(process: LineProcess, template: str, special_tokens: str, place: Place) -> list[str]:
    context, _ = place
    question = {
        "template": template,
        "special_tokens": json.loads(special_tokens),
        "chats": _chats(place, template),
        "tools": json.loads(context.tools) if context.tools and _knows_tools(template) else None,
        "arguments": _arguments(context),
    }
    try:
        reply = process.ask(question, TIME_BUDGET_S)
    except LineProcessError as error:
        raise _refusal(f"one that does not end within its time and memory ({error})", context) from None
    texts = reply.get("texts")
    if not isinstance(texts, list) or len(texts) != len(PROBES) or not all(type(text) is str for text in texts):
        raise _refusal(f"one that fails: {ascii(reply.get('error', 'no texts'))[:200]}", context)
    return texts


def _frame(texts: list[str], place: Place) -> PromptFrame:
    context, role = place
    if role is not None:
        parts = [text.rpartition(_ANSWERED) for text in texts]
        if not all(answer for _, answer, _ in parts):
            raise _refusal("one that changes earlier answers", context)
        texts = [after for _, _, after in parts]
    before, found, after = texts[0].rpartition(_WORDS)
    for strips in (False, True):
        frame = PromptFrame(before, after, strips)
        if found and [frame.around(one) for one in PROBES] == texts:
            if role is None:
                _check_shows(before, context)
            return frame
    raise _refusal("one that changes prompts", context)


def _check_shows(before: str, context: PromptContext) -> None:
    """Raise PolicyError unless the text before the prompt has the system prompt, and all examples in order."""
    parts: list[tuple[str, str]] = []
    for number, (prompt, answer) in enumerate(context.examples):
        parts += [(f"examples[{number}].prompt", prompt), (f"examples[{number}].answer", answer)]
    position = 0
    for name, part in parts:
        found = before.find(part.strip(), position)
        if found < 0:
            raise _not_shown(name)
        position = found + len(part.strip())
    if context.system.strip() not in before:
        raise _not_shown("system")


def _not_shown(part: str) -> PolicyError:
    return PolicyError(
        f"the chat template of policy.base must write {part} of a task source as it is, got one that changes it or leaves it "
        "out (many do with reasoning in earlier answers); shorten it, or write it into prompt_template"
    )


def _report_unused(template: str, context: PromptContext) -> None:
    """Nodes of one swarm may have different bases, so an argument that this base does not know is no error."""
    for name in _arguments(context):
        if re.search(rf"\b{name}\b", template) is None:
            logger.warning("the chat template of the base does not use %s of template_arguments", name)


def _refusal(found: str, context: PromptContext = PLAIN) -> PolicyError:
    if context != PLAIN:
        return PolicyError(
            "policy.base must have a chat template that can write system, examples and template_arguments of the task sources, "
            f"got {found}; change these settings, or take another base"
        )
    return PolicyError(
        "policy.base must have a chat template that writes a user's message as it is, between texts that stay the same, got "
        f"{found}; take another base, or remove the template from a copy of it"
    )
