"""Frozen carriers between the stages of the data path, in the order in which data meets them.

    TaskRef → Task → Rollout → RolloutGroup → Header + body → SignedRecord → (admission) → RolloutGroup

`T` is the number of tokens of one answer, `G` the number of rollouts of one group.

Beside it, for merging adapters: Snapshot (own) → exchange with one other node → Partner (with its snapshot) or Alone
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard

MAX_PRECISION_CHARS = 16
MAX_ADAPTER_BYTES = 4 << 30


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether decoded data is a list. Nothing is known of its items."""
    return isinstance(value, list)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether decoded data is a list or a tuple. Nothing is known of its items."""
    return isinstance(value, list | tuple)


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether data is a mapping, whose keys are texts. Nothing is known of its values."""
    return isinstance(value, Mapping)


def is_table(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether decoded JSON or TOML is a table, whose keys are texts. Nothing is known of its values."""
    return isinstance(value, dict)


@dataclass(frozen=True, slots=True)
class TaskRef:
    """A reference from which any node that knows the source rebuilds prompt, answer and verifier."""

    source: str
    """Name of the task source, such as `chain_sum`."""
    config_digest: str
    """16 hex digits over the source's kind, name and parameters (for a file: over its content)."""
    seed: int
    """Stream of tasks, 0 <= seed < 2**31. Streams below 16 are reserved (see `tasks.task_source`)."""
    index: int
    """Position in the stream, 0 <= index < 2**20."""


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What a chat template writes around the prompts of a task source, besides its own text."""

    system: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    """(prompt, answer) of earlier turns."""
    arguments: str = ""
    """Arguments of the template as JSON with its keys in order; empty where there are none."""
    tools: str = ""
    """The tools that an answer may call, as JSON of a list of functions; empty where there are none."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The texts that a chat template writes around the messages of a chat."""

    first: str
    """Before the first message of a user, where there is no system prompt."""
    system: tuple[str, str] | None
    """Before and after a system prompt, the second up to the first message of a user; None where the template has none."""
    next: str
    """Between an answer and the next message of a user."""
    after: str
    """After each message of a user."""


PLAIN = PromptContext()
"""The context of a prompt that stands alone."""


Role = Literal["user", "tool"]
"""As whom an environment speaks to the policy, in the words of chat templates."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment makes of one answer."""

    reply: str
    """What it tells the policy, which answers again; unused where the episode is over."""
    reward: float
    """Reward of this turn. The sum over an episode is in [0, 1]."""
    is_done: bool
    """Whether the episode is over."""
    role: Role = "user"
    state: str = ""
    """Equal for equal situations of the environment, whatever led there. Empty: the reply tells the whole situation."""
    is_exact: bool = True
    """Whether every machine gives this very reply. Where a policy's own program gave it, another reply is nobody's lie."""


class Episode(Protocol):
    """One run of an environment. It belongs to one thread at a time."""

    def step(self, answer: str) -> Step:
        """Take the text of the next answer. Equal answers from the beginning give equal steps, on every node.

        It is not called again after a step that is done. It may raise on hostile text: callers count that as TaskFailure.
        """
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with its verifier, or with an environment that replies to answers."""

    ref: TaskRef
    prompt: str
    verify: Callable[[str], float | Mapping[str, float]]
    """Of an answer's text: the reward in [0, 1], or named signals, each in [0, 1], `correct` among them.

    Tells every node the same; may raise on hostile text: callers count that as TaskFailure.
    """
    weights: tuple[tuple[str, float], ...] = ()
    """(signal, weight), weights summing to 1: the reward is the weighted sum. Empty: it is `correct` alone."""
    token_length: Callable[[int], float] | None = None
    """The signal `length` by an answer's number of tokens, where the source measures it in tokens; `verify` omits it then."""
    context: PromptContext = PLAIN
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    """Further fields of the task as values of JSON, such as the other columns of a row, for reward functions."""
    has_judge: bool = False
    """Whether a language model takes part in the reward: readers believe the claim, as they cannot compute it again."""
    begin: Callable[[], Episode] | None = None
    """Begins an episode, whose steps give the reward in place of `verify`; None where one answer is all."""
    max_turns: int = 1
    """Most answers of an episode, in [1, MAX_TURNS]."""


MAX_TURNS = 64
"""Most answers of an episode."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a policy descends from; equal fields say how far its rollouts and weights are usable."""

    policy: str
    """32 hex digits over base, tokenizer and adapter shape. Equal: token ids, log-probs and adapters are usable."""
    tokenizer: str
    """32 hex digits over vocabulary and chat template. Equal: token ids are usable; else text only."""
    earlier: str = field(default="", compare=False)
    """What version 0.1 called `policy`, without the settings of the base. Empty for the lineage of a record."""

    def has_name(self, policy: str) -> bool:
        """Whether a checkpoint or a manifest, which may be of an earlier version, means this policy by `policy`."""
        return bool(policy) and policy in (self.policy, self.earlier)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode that was not its last: an answer, and the environment's reply."""

    text: str
    """Answer as decoded, special tokens removed."""
    reply: str
    """What the environment told, without what a chat template writes around it."""
    role: Role
    start: int
    """Index of the reply's first token, among the tokens of the rollout. The answer ends before it."""
    stop: int
    """Index after the reply's last token, where the next answer begins."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer, or one episode of several."""

    text: str
    """Answer as decoded, special tokens removed; of an episode its last one."""
    token_ids: tuple[int, ...]
    """[T] tokens of the answer; the last one is EOS if `finished`. In an episode those of replies are among them, as the policy
    has read them."""
    logprobs: tuple[float, ...]
    """[T] log μ: log-probability of each token under the distribution it was sampled from; 0 for tokens of replies."""
    finished: bool
    """Whether EOS was sampled; False means cut at the token limit, or ended by a stop string, which the text then holds. An
    episode that was cut has no EOS at its end."""
    reward: float
    """In [0, 1]. From a peer it is a claim until admission has recomputed it."""
    signals: tuple[tuple[str, float], ...] = ()
    """(name, value) of every reward signal, where the verifier tells several; never sent, recomputed as the reward is."""
    segments: tuple[tuple[int, int], ...] = ()
    """(policy version, number of tokens that it sampled), in order, of an own answer begun by an earlier version than it
    ended with; empty where all of it is of the group's version. Never sent."""
    turns: tuple[Turn, ...] = ()
    """The turns before the last answer; empty where there was one answer only."""
    turn_rewards: tuple[float, ...] = ()
    """The reward of each turn, the last one's included; empty for one answer. Never sent, recomputed as the reward is."""
    states: tuple[str, ...] = ()
    """What identifies the environment's situation before each answer; as `turn_rewards`."""
    is_cut: bool = False
    """Whether an episode ended before the environment said so; as `turn_rewards`."""
    num_given: int = 0
    """Number of tokens at the beginning that are a peer's, where the answer continues a hint; their log-probs are 0. Such an
    answer is never sent."""

    @property
    def num_chars(self) -> int:
        """Characters of all texts together."""
        return len(self.text) + sum(len(turn.text) + len(turn.reply) for turn in self.turns)

    @property
    def answers(self) -> tuple[str, ...]:
        """The texts of all answers, in order."""
        return (*(turn.text for turn in self.turns), self.text)

    @property
    def written(self) -> tuple[bool, ...]:
        """[T] whether the policy wrote the token; those of hints and of replies are not trained on."""
        written = [False] * self.num_given + [True] * (len(self.token_ids) - self.num_given)
        for turn in self.turns:
            written[turn.start : turn.stop] = [False] * (turn.stop - turn.start)
        return tuple(written)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """Sibling rollouts of one task by one policy version."""

    task: TaskRef
    prompt_digest: str
    """16 hex digits over the prompt's text: proves that author and reader rebuilt the same task."""
    rollouts: tuple[Rollout, ...]
    """[G]"""
    author: str
    """Peer id (base58) of the node that sampled it."""
    lineage: Lineage
    policy_version: int
    """Optimizer steps that the author's policy had taken."""

    @property
    def mean_reward(self) -> float:
        return sum(rollout.reward for rollout in self.rollouts) / len(self.rollouts)

    @property
    def has_reward_variance(self) -> bool:
        """Whether rewards differ: a zero-variance group has zero advantage everywhere (DAPO, 2503.14476)."""
        return len({rollout.reward for rollout in self.rollouts}) > 1


BEACON_BYTES = 16


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What a header tells of one group, so that a reader can choose before it pulls the body."""

    task: TaskRef
    num_rollouts: int
    mean_reward: float


USUAL_ANSWER_TOKENS = 4096
"""Every reader has room for answers of this length. Records with longer ones say so in their header."""


@dataclass(frozen=True, slots=True)
class Header:
    """Announcement of one body; about 300 bytes signed."""

    swarm_id: str
    """32 hex digits."""
    author: str
    sequence: int
    """Counts the author's headers; a restart continues it."""
    body_hash: bytes
    """SHA-256 of the body as transferred."""
    body_bytes: int
    groups: tuple[GroupSummary, ...]
    lineage: Lineage
    policy_version: int
    created_at: float
    """Swarm time, seconds since the epoch."""
    expires_at: float
    beacon: bytes = b""
    """BEACON_BYTES of the body hash of another's record, from which most of the tasks follow; empty where there is none."""
    max_answer_tokens: int = USUAL_ANSWER_TOKENS
    """What a reader must accept per answer to read the body; see `swarm.records.codec.needed_answer_tokens`."""


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """Payload bytes exactly as sent, with the author's Ed25519 signature; never re-encoded."""

    author: str
    payload: bytes
    signature: bytes
    """64 bytes."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An adapter as bytes, at the end of its inner steps."""

    lineage: str
    """32 hex digits: `Lineage.policy`."""
    precision: str
    """How the numbers are written, such as `bf16`; at most 16 characters."""
    outer_round: int
    policy_version: int
    payload: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be offered."""
        if not 0 < len(self.payload) <= MAX_ADAPTER_BYTES:
            raise ValueError(f"an adapter must have 1 to {MAX_ADAPTER_BYTES} bytes, got {len(self.payload)}")
        if len(self.precision) > MAX_PRECISION_CHARS:
            raise ValueError(f"a precision must have at most {MAX_PRECISION_CHARS} characters, got {self.precision!r}")


@dataclass(frozen=True, slots=True)
class Partner:
    """The adapter of one other node. Its bytes are those that the node signed for; nothing is said of their worth."""

    peer_id: str
    snapshot: Snapshot
    offered_at: float = 0.0
    """Swarm time of the offer, in seconds, as the node says."""


@dataclass(frozen=True, slots=True)
class Alone:
    """No adapter of another node this time: a solo step."""

    reason: str
    """nobody: none was ready. declined: none of those took this node. replaced: a newer snapshot was offered.
    stopped: the exchange does not run. paused: a person has paused sharing.
    Else why the transfer failed, a word of `errors.RequestFailure`."""


Outcome = Partner | Alone


@dataclass(frozen=True, slots=True)
class Seats:
    """Who takes part in a final merge: the same on all nodes that read the same list."""

    peer_ids: tuple[str, ...]
    """By place."""
    own_place: int

    @property
    def own_peer_id(self) -> str:
        return self.peer_ids[self.own_place]


@dataclass(frozen=True, slots=True)
class Appointment:
    """One exchange of a final merge that this node is to have."""

    window: int
    """It ends with this window, counted from the beginning of the merge."""
    peer_id: str
    gives: bool
    takes: bool
    weight: int
    """Replicas in the own adapter."""
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class MeetResult:
    """What came of an appointment."""

    partner: Partner | None
    """With the other side's adapter, if there was one to take and it came."""
    weight: int
    """Replicas that it says are in it."""
    reason: str = ""
    """Why it failed, where it did: as in `Alone`, or why the other side declined."""
