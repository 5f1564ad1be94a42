"""Which reasoning-gym data sets a swarm may use, and which answers their verifiers may see.

Rewards of other nodes are recomputed here, so a verifier meets text that a stranger wrote. Some of the library's verifiers
run an answer as Python code (`eval`, `sympy.parse_expr`), and one hangs on `1e999999999`. An answer reaches those only if
every character belongs to an alphabet in which nothing but the expected literals can be written.
Reviewed against reasoning-gym 0.1.25.
"""

import re

MAX_ANSWER_CHARS = 16_384
"""Longer answers are wrong, whatever the data set. Most verifiers take time in proportion to the text."""

_NUMBER_LISTS = re.compile(r"[\d\s,\[\]-]{0,16384}", re.ASCII)
_ARITHMETIC = re.compile(r"(?!.*\*\s*\*)(?!.*//)[\d\s+\-*/().]{0,256}", re.ASCII | re.DOTALL)

ALPHABETS: dict[str, re.Pattern[str]] = {
    "binary_matrix": _NUMBER_LISTS,
    "spiral_matrix": _NUMBER_LISTS,
    "n_queens": re.compile(r"[\sQ_,'\"\[\]]{0,16384}", re.ASCII),
    "string_insertion": re.compile(r"[\sA-E,'\"\[\]]{0,4096}", re.ASCII),
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
    "coin_flip": re.compile(r"[\d\s,./+-]{0,256}", re.ASCII),
}
"""Full patterns of the answers that these verifiers may see; powers, known names and calls are outside all of them."""

_RUNS_ANSWERS = "its verifier runs answers as Python code, also those of strangers"
_VARIES = "its tasks differ from process to process, so no other node could rebuild them"

REFUSED: dict[str, str] = {
    "simple_integration": _RUNS_ANSWERS,
    "intermediate_integration": _RUNS_ANSWERS,
    "polynomial_multiplication": _RUNS_ANSWERS,
    "codeio": _VARIES,
    "isomorphic_strings": _VARIES,
    "knight_swap": _VARIES,
    "ransom_note": _VARIES,
    "composite": "a mixture is made of several sources",
}
"""Data sets that cannot be a source, with the reason."""


def admissible(data_set: str, text: str) -> str:
    """The text if the data set's verifier may see it, else the empty text, which the verifier scores as it likes."""
    alphabet = ALPHABETS.get(data_set)
    if len(text) > MAX_ANSWER_CHARS or (alphabet is not None and alphabet.fullmatch(text) is None):
        return ""
    return text
