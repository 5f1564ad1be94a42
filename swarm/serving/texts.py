"""From messages to token ids, and from sampled tokens to text that can be shown at once."""

import threading
from collections.abc import Callable, Mapping, Sequence

from swarm.policy.policy import TextPolicy
from swarm.policy.prompts.chat_template import ConversationRenderer
from swarm.types import PromptContext

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the first bytes of a character as."""

Message = Mapping[str, str]
"""{"role": system, user or assistant, "content": text}."""


class PromptTexts:
    """Encodes conversations and texts for a policy. Safe from any thread: one encodes at a time."""

    def __init__(self, policy: TextPolicy, context: PromptContext, *, is_own: bool) -> None:
        """`context` is written around conversations that bring no system message of their own.

        `is_own`: the chat template is part of this package.
        """
        self._encoder = policy.prompts.copy()
        self._context = context
        self._lock = threading.Lock()
        self._renderer = (
            ConversationRenderer(self._encoder.tokenizer, is_own=is_own) if self._encoder.has_template else None
        )

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids that the next answer follows; empty where the tokenizer cannot encode them.

        Without a chat template the messages stand on lines of their own. Raises PolicyError where the template refuses them.
        """
        messages = [*self._begin(messages), *messages]
        with self._lock:
            if self._renderer is None:
                return self._encoder.encode_text(_joined(messages))
            return self._encoder.encode_rendered(self._renderer.render(messages, self._context.arguments))

    def text(self, text: str) -> list[int]:
        """Return the token ids of a text that the policy goes on writing, without a chat template."""
        with self._lock:
            return self._encoder.encode_text(text)

    def close(self) -> None:
        """End the process that renders."""
        if self._renderer is not None:
            self._renderer.close()

    def _begin(self, messages: Sequence[Message]) -> list[Message]:
        """Return what the tasks that the policy was trained on begin with."""
        if messages and messages[0]["role"] == "system":
            return []
        begin: list[Message] = []
        if self._context.system:
            begin.append({"role": "system", "content": self._context.system})
        for prompt, answer in self._context.examples:
            begin += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return begin


def _joined(messages: Sequence[Message]) -> str:
    """As `PromptEncoder.encode_reply` puts a reply without a chat template: an answer follows its prompt directly."""
    text = ""
    for message in messages:
        if message["role"] == "assistant":
            text += f"{message['content']}\n"
        else:
            text += f"{message['content']}\n\n" if message["role"] == "system" else message["content"]
    return text


class TextStream:
    """The text of one answer in pieces, which together are its text up to the first string of `cut`."""

    def __init__(self, decode: Callable[[Sequence[int]], str], cut: Sequence[str] = ()) -> None:
        self._decode = decode
        self._cut = tuple(cut)
        self._token_ids: list[int] = []
        self._known = 0  # tokens before it have been decoded for good
        self._decoded = 0  # and those before this one as far as whole characters
        self._held = ""
        self._is_cut = False

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Take tokens; returns the text that is certain now, all that is left if they are the last ones."""
        self._token_ids += token_ids
        self._held += self._new_text(is_last)
        if self._is_cut:
            return ""
        places = [place for one in self._cut if (place := self._held.find(one)) >= 0]
        if places:
            self._is_cut = True
            return self._held[: min(places)]
        num_held = 0 if is_last else max((_overlap(self._held, one) for one in self._cut), default=0)
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        return text

    def _new_text(self, is_last: bool) -> str:
        """Decode with a few tokens before: some tokenizers write a token in another way where a text begins."""
        before = self._decode(self._token_ids[self._known : self._decoded])
        now = self._decode(self._token_ids[self._known :])
        if not is_last and now.endswith(_UNFINISHED):
            return ""
        self._known, self._decoded = self._decoded, len(self._token_ids)
        return now[len(before) :]


def _overlap(text: str, string: str) -> int:
    """Number of characters at the end of a text with which `string` begins."""
    return next((size for size in range(min(len(text), len(string) - 1), 0, -1) if string.startswith(text[-size:])), 0)
