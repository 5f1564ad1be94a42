"""Text made on the spot: a language of made-up words, each of which is followed by one of a few. One character is one token.

To foresee a character takes the word so far and, at its beginning, the word before: something to learn at every depth.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALPHABET = " abcdefghijklmnop"
NUM_WORDS = 96
_FOLLOWERS = 3


@dataclass(frozen=True, slots=True)
class Language:
    """Words, and which may come after each."""

    words: Sequence[str]
    followers: Mapping[str, Sequence[str]]

    def text(self, rng: random.Random, num_chars: int) -> str:
        """A stretch of it, which begins with a whole word."""
        word = rng.choice(self.words)
        text = word
        while len(text) < num_chars:
            word = rng.choice(self.followers[word])
            text += f" {word}"
        return text[:num_chars]


def language(name: str) -> Language:
    """The same for the same name."""
    rng = random.Random(f"language/{name}")
    letters = ALPHABET.strip()
    words = sorted({"".join(rng.choices(letters, k=rng.randint(3, 7))) for _ in range(NUM_WORDS)})
    return Language(words, {word: rng.sample(words, _FOLLOWERS) for word in words})


def token_ids(text: str) -> list[int]:
    """Places in `ALPHABET`."""
    return [ALPHABET.index(character) for character in text]
