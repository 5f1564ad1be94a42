"""Values as a page may show them: finite numbers, and text in which nothing hides, colours or turns around.

Every reason for which something of others was turned away, in plain words.
"""

import math
from collections.abc import Mapping
from typing import Any

from swarm.observability.plain_text import plain
from swarm.records.rejection import Rejection

WORDS: dict[Rejection, str] = {
    Rejection.OVERSIZE: "larger than the protocol allows",
    Rejection.MALFORMED: "not in the form that the protocol asks for",
    Rejection.VERSION: "from a node with another version of the protocol",
    Rejection.FOREIGN_SWARM: "made for another swarm",
    Rejection.OWN_RECORD: "carries this node's own name but came from elsewhere",
    Rejection.BAD_SIGNATURE: "the signature does not fit: forged, or altered on the way",
    Rejection.WRONG_SLOT: "stored under another author's name",
    Rejection.EXPIRED: "its time was over when it came",
    Rejection.CLOCK_SKEW: "dated in the future: a clock is wrong, there or here",
    Rejection.REPLAY: "known already; harmless",
    Rejection.RATE: "its author sent more than one author may",
    Rejection.UNKNOWN_TASK: "its tasks are not set up on this node",
    Rejection.HELD_OUT_TASK: "its tasks are kept for evaluation",
    Rejection.BANNED: "its author said what was not so, and is not heard for a while",
    Rejection.UNAVAILABLE: "nobody who has it answered",
    Rejection.WRONG_HASH: "other bytes came than were announced",
    Rejection.HEADER_MISMATCH: "its content is not what was announced",
    Rejection.TOKENS: "tokens that do not spell the answer, or do not exist",
    Rejection.LOGPROBS: "impossible probabilities",
    Rejection.TASK_MISMATCH: "its prompt is not the one of the task; often another version of the task",
    Rejection.TASK_FAILED: "its task could not be checked here; not its author's fault",
    Rejection.TOO_SLOW: "checking its author's answers takes too long",
    Rejection.STRANGERS_BUSY: "no time left for checking strangers' answers; tried again later",
    Rejection.REWARD_MISMATCH: "claims another reward than this node computed",
    Rejection.COPIED: "copied from another author",
    Rejection.STALE: "from a policy that has moved on since; nobody's fault",
    Rejection.NO_SIGNAL: "all its answers were equally good or bad: nothing to learn; nobody's fault",
}


MAX_CHARS = 4000
_MAX_DEPTH = 8


def shown(value: Any, depth: int = 0) -> Any:
    """`value` for strict JSON: NaN and infinity become None, text is made plain and cut; whatever else there is, its type."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return shown_text(value, MAX_CHARS)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {shown_text(str(key), 200): shown(entry, depth + 1) for key, entry in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [shown(entry, depth + 1) for entry in value]
    return type(value).__name__


def shown_text(text: str, max_chars: int) -> str:
    """At most so many characters of it, line ends and tabs kept, other control and invisible characters written out."""
    cut = plain(text[:max_chars], keep="\n\t")
    return f"{cut} … ({len(text)} characters)" if len(text) > max_chars else cut
