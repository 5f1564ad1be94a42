"""Whether the text of an answer has come to a stop string."""

from collections.abc import Callable, Sequence


class StopStrings:
    """Looks at the text of an answer only after tokens that can complete a stop string: decoding costs more than a look."""

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> None:
        self._decode = decode
        self._strings = tuple(strings)
        self._last_characters = {string[-1] for string in self._strings}
        # some tokenizers drop blanks at the edge of a text: a token's own text does not tell, then
        self._always_looks = any(character.isspace() for character in self._last_characters)
        self._can_complete: dict[int, bool] = {}  # by token, filled as they come

    def __bool__(self) -> bool:
        return bool(self._strings)

    def are_in(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of `token_ids`, of which all but the last were looked at before, contains a stop string."""
        if not self._strings or not self._may_be_completed_by(token_ids[-1]):
            return False
        text = self._decode(token_ids)
        return any(string in text for string in self._strings)

    def _may_be_completed_by(self, token: int) -> bool:
        if self._always_looks:
            return True
        if token not in self._can_complete:
            text = self._decode([token])
            # U+FFFD: some bytes of a character, which others of it come before
            self._can_complete[token] = "\ufffd" in text or not self._last_characters.isdisjoint(text)
        return self._can_complete[token]
