"""What the page may show: values made safe for strict JSON, and a sentence for every reason of a rejection.

Numbers are finite, and text has no control characters that could hide, colour or reverse it.
"""

import math
from collections.abc import Mapping
from typing import Any

from swarm.observability.plain_text import plain
from swarm.records.rejection import Rejection

WORDS: dict[Rejection, str] = {
    Rejection.OVERSIZE: "larger than the protocol allows",
    Rejection.MALFORMED: "not in the form that the protocol requires",
    Rejection.VERSION: "from a node with another version of the protocol",
    Rejection.FOREIGN_SWARM: "made for another swarm",
    Rejection.OWN_RECORD: "has this node's own name but came from elsewhere",
    Rejection.BAD_SIGNATURE: "the signature is wrong: the record was forged or changed on the way",
    Rejection.WRONG_SLOT: "stored under another author's name",
    Rejection.EXPIRED: "it had expired when it arrived",
    Rejection.CLOCK_SKEW: "dated in the future: the clock of its author or of this node is wrong",
    Rejection.REPLAY: "already known; harmless",
    Rejection.RATE: "its author sent more than the rate limit allows",
    Rejection.UNKNOWN_TASK: "its tasks are not set up on this node, or another version of swarm scores them by other rules",
    Rejection.HELD_OUT_TASK: "its tasks are reserved for evaluation",
    Rejection.BANNED: "its author made false claims and is ignored for some time",
    Rejection.UNAVAILABLE: "no peer that has the body answered",
    Rejection.WRONG_HASH: "the body is not the announced one: its hash differs",
    Rejection.HEADER_MISMATCH: "its content is not what was announced",
    Rejection.TOKENS: "its tokens do not decode to the answer, or do not exist",
    Rejection.TOO_LONG: "its answers are longer than this node accepts; nobody's fault",
    Rejection.LOGPROBS: "impossible probabilities",
    Rejection.TASK_MISMATCH: "its prompt is not that of the task; often its author has another version of the task",
    Rejection.TASK_FAILED: "its task could not be checked on this node; not its author's fault",
    Rejection.TOO_SLOW: "checking its author's answers takes too long",
    Rejection.STRANGERS_BUSY: "no time was left to check strangers' answers; it is tried again later",
    Rejection.FORGED_EPISODE: "its environment replied otherwise than this node's does",
    Rejection.REWARD_MISMATCH: "its claimed reward is not the one that this node computed",
    Rejection.COPIED: "copied from another author",
    Rejection.STALE: "from an outdated policy version; nobody's fault",
    Rejection.NO_SIGNAL: "all its answers have the same reward, so there is nothing to learn; nobody's fault",
}


MAX_CHARS = 4000
_MAX_DEPTH = 8


def shown(value: Any, depth: int = 0) -> Any:
    """Converts `value` for strict JSON: NaN and infinity become None, text is plain and cut, other types become a name."""
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
