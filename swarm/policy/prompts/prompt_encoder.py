"""Encodes prompts as token ids, through the base's chat template where there is one."""

import contextlib
import copy
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from swarm.errors import PolicyError
from swarm.policy.prompts.chat_template import Place, PromptFrame, prompt_frames, tools_as_text
from swarm.types import PLAIN, PromptContext, Role, Turns

logger = logging.getLogger(__name__)

_OPEN_SYSTEM = "Here stands what the system prompt says."


class surviving_panics(AbstractContextManager[None]):  # noqa: N801  a context manager like `suppress`
    """A context manager that ends early where the native code of a tokenizer panics over a text.

    A pattern in tokenizer.json gives up after a number of steps, and its panic is no Exception. Pattern and text may come
    from strangers, who could otherwise end the thread that reads them.
    """

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        is_panic = kind is not None and kind.__name__ == "PanicException" and not issubclass(kind, Exception)
        if is_panic:
            logger.warning("the tokenizer failed over a text: %s", error)
        return is_panic


def encoded(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Return the token ids of a text. Empty where the tokenizer cannot encode it."""
    with surviving_panics():
        # whoever encodes compares the length with a bound of its own
        return list(tokenizer(text, verbose=False, **options).input_ids)
    return []


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of token ids without special tokens. Empty where the tokenizer cannot decode them."""
    with surviving_panics():
        return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return ""


class PromptEncoder:
    """The tokenizer of a base with the frames of its chat template, one per context. It belongs to one thread."""

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...], *, is_own: bool) -> None:
        """`is_own`: the chat template is part of this package. Raises PolicyError for a template that is refused."""
        self.tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._is_own = is_own
        self._frames: dict[Place, PromptFrame | None] = {}
        self._eos_texts = tuple(filter(None, map(str, tokenizer.convert_ids_to_tokens(list(eos_token_ids)))))
        try:
            self._prepare([(PLAIN, None), (PLAIN, "user")])
        except PolicyError:  # a template that frames no replies may do for tasks of one turn
            self._prepare([(PLAIN, None)])
        self.end_token_id = self._end_token_id()
        """The EOS that ends an answer of the chat template, which need not be the tokenizer's; that one where none does."""

    def copy(self) -> "PromptEncoder":
        """Return an encoder for another thread, which knows the same frames."""
        other = copy.copy(self)
        other.tokenizer = copy.deepcopy(self.tokenizer)
        other._frames = dict(self._frames)
        return other

    @property
    def has_template(self) -> bool:
        return self._frames[PLAIN, None] is not None

    def _end_token_id(self) -> int:
        reply = self._frames.get((PLAIN, "user"))
        texts = {str(self.tokenizer.convert_ids_to_tokens(one)): one for one in reversed(self._eos_token_ids)}
        ends = [text for text in texts if text and reply is not None and reply.before.lstrip().startswith(text)]
        return texts[max(ends, key=len)] if ends else self._eos_token_ids[0]

    def prepare(self, contexts: Iterable[PromptContext]) -> None:
        """Render the chat template for these contexts, in one process. Raises PolicyError as `prompt_frames` does."""
        self._prepare([(context, None) for context in contexts])

    def prepare_replies(self, contexts: Iterable[PromptContext]) -> None:
        """Do the same for replies of environments. Where the template knows no tools, these speak as users."""
        for context in dict.fromkeys(contexts):
            self._prepare([(context, "user")])
            if (context, "tool") not in self._frames:
                try:
                    self._prepare([(context, "tool")])
                except PolicyError as error:
                    logger.info("tools reply as users: %s", error)
                    self._frames[context, "tool"] = self._frames[context, "user"]

    def _prepare(self, places: Iterable[Place]) -> None:
        if new := [place for place in dict.fromkeys(places) if place not in self._frames]:
            self._frames |= prompt_frames(self.tokenizer, new, is_own=self._is_own)

    def render(self, text: str, context: PromptContext = PLAIN) -> str:
        """Return the prompt as the chat template writes it; the text itself where there is no template."""
        self.prepare([context])
        frame = self._frames[context, None]
        if frame is None:
            return f"{tools_as_text(context.tools)}\n\n{text}" if context.tools else text
        return frame.around(text)

    def encode_reply(self, text: str, role: Role, context: PromptContext = PLAIN, *, after_eos: bool) -> list[int]:
        """Return the token ids between an answer, which has EOS as its last token where `after_eos`, and the next answer.

        They begin after the answer's tokens, which are never encoded again. Without a chat template the reply stands on lines of
        its own. Empty where the tokenizer cannot encode the text.
        """
        self.prepare_replies([context])
        frame = self._frames[context, role]
        rendered = f"\n{text}\n" if frame is None else frame.around(text)
        if after_eos:
            rendered = rendered.removeprefix(next((eos for eos in self._eos_texts if rendered.startswith(eos)), ""))
        return encoded(self.tokenizer, rendered, add_special_tokens=False)

    def encode(self, text: str, context: PromptContext = PLAIN) -> list[int]:
        """Return the token ids that an answer follows. Empty where the tokenizer cannot encode the text."""
        rendered = self.render(text, context)
        return self.encode_rendered(rendered) if self.has_template else self.encode_text(rendered)

    def encode_rendered(self, rendered: str) -> list[int]:
        """Return the token ids of what the chat template wrote, with all special tokens that belong there."""
        return encoded(self.tokenizer, rendered, add_special_tokens=False)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text that an answer continues, without a chat template."""
        token_ids = encoded(self.tokenizer, text)
        if token_ids and token_ids[-1] in self._eos_token_ids:  # some tokenizers append EOS to every text
            token_ids.pop()
        return token_ids

    def turns(self, context: PromptContext = PLAIN) -> Turns | None:
        """Return the texts that the chat template writes around messages; None where there is no template.

        Its system prompt is left open, for another program to fill in.
        """
        unset = replace(context, system="")
        self.prepare([unset])
        first = self._frames[unset, None]
        if first is None:
            return None
        self.prepare_replies([unset])
        reply = self._frames[unset, "user"]
        assert reply is not None, "a template that frames prompts frames replies"
        system: tuple[str, str] | None = None
        told = replace(context, system=_OPEN_SYSTEM)
        with contextlib.suppress(PolicyError):  # a template without system prompts
            self.prepare([told])
            frame = self._frames[told, None]
            before, mark, after = frame.before.partition(_OPEN_SYSTEM) if frame else ("", "", "")
            system = (before, after) if mark else None
        return Turns(first=first.before, system=system, next=reply.before, after=first.after)

    def check_marker(self, marker: str) -> None:
        """Raise PolicyError for a text that no decoded answer can have: special tokens disappear."""
        token_ids = encoded(self.tokenizer, marker, add_special_tokens=False)
        with surviving_panics():
            if marker in self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
                return
        raise PolicyError(
            f"the answer rule of a task source must find its mark in decoded answers, got {marker}, which the tokenizer of "
            "policy.base cannot write or leaves out as a special token; choose another rule"
        )

    def check_plain(self, text: str, setting: str) -> None:
        """Raise PolicyError where a text that is the same for all tasks holds a special token, which could begin a turn."""
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        if found := sorted(token for token in special if token and token in text):
            raise PolicyError(
                f"{setting} must have no special token of policy.base, which could begin a turn of its own, got "
                f"{found[0]!a}; remove it"
            )
