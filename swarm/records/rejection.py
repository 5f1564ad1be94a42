"""Why admission turned something away; the value is the reason counted in metrics and shown to users."""

from enum import StrEnum


class Rejection(StrEnum):
    """Reason codes, in the order in which the checks run."""

    OVERSIZE = "oversize"
    """Record or body exceeds its byte bound."""
    MALFORMED = "malformed"
    """Not the encoding, types or bounds that the protocol asks for."""
    VERSION = "version"
    """Another protocol version."""
    FOREIGN_SWARM = "foreign_swarm"
    """Made for another swarm."""
    OWN_RECORD = "own_record"
    """Carries our own name and comes from elsewhere."""
    BAD_SIGNATURE = "bad_signature"
    """The signature does not match the author's key: forged or altered."""
    WRONG_SLOT = "wrong_slot"
    """Stored under a subkey of another author or outside the author's slots."""
    EXPIRED = "expired"
    """Its time to live is over."""
    CLOCK_SKEW = "clock_skew"
    """Created in the future, or claims a longer life than the protocol allows."""
    REPLAY = "replay"
    """The same header, or a body that is already known, announced again."""
    RATE = "rate"
    """More headers than one author may send."""
    UNKNOWN_TASK = "unknown_task"
    """Refers to a task source that this node does not have."""
    HELD_OUT_TASK = "held_out_task"
    """Refers to a task that is kept for evaluation."""
    UNAVAILABLE = "unavailable"
    """No holder delivered the body."""
    WRONG_HASH = "wrong_hash"
    """The body is not the one that the header announced."""
    HEADER_MISMATCH = "header_mismatch"
    """The body's groups are not those of the header."""
    TOKENS = "tokens"
    """Token ids outside the vocabulary, too many, or text that they do not spell."""
    LOGPROBS = "logprobs"
    """Log-probs that are no log-probabilities, or of another length than the tokens."""
    TASK_MISMATCH = "task_mismatch"
    """The author's prompt is not the one that this node rebuilds from the reference."""
    TASK_FAILED = "task_failed"
    """The task or its verifier failed here; says nothing about the author."""
    TOO_SLOW = "too_slow"
    """Checking this author's answers takes more time than one author gets."""
    REWARD_MISMATCH = "reward_mismatch"
    """Claims another reward than the recomputed one."""
    STALE = "stale"
    """Its author's policy has moved on too many versions since; says nothing about the author."""
    NO_SIGNAL = "no_signal"
    """All rewards of a group are equal: nothing to learn; says nothing about the author."""


class InvalidRecord(Exception):
    """Admission turns a record, body or group away."""

    def __init__(self, reason: Rejection, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
