"""Every reason for which something of others was turned away, in plain words."""

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
