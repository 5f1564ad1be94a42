"""One hostile node: names of its own, a copy of the base to sample with, and what it sends in each kind of attack."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.config import Config
from swarm.experiments.memory_exchange import MemoryExchange
from swarm.policy.policy import Policy
from swarm.records.codec import (
    MAX_GROUPS_PER_BODY,
    body_hash,
    decode_body,
    decode_header,
    decode_record,
    encode_body,
    encode_header,
    encode_record,
)
from swarm.records.identity import Identity
from swarm.records.signing import sign_record
from swarm.rollouts.worker import RolloutWorker
from swarm.tasks.task_cursor import TaskCursor
from swarm.tasks.task_mixture import TaskMixture, score, training_seed
from swarm.types import GroupSummary, Header, Lineage, Rollout, RolloutGroup, Task

_GROUPS_PER_RECORD = 4
_SPAM_PER_ROUND = 200
_JUNK = " lol ok lol"
_UNLIKELY = -12.0
"""Claimed log-prob of poisoned tokens: so unlikely that no correction by importance weights holds them back."""
_DIGITS = "012"
_MAX_HOARDED = 64


@dataclass(frozen=True)
class HostileMeans:
    """What all hostile nodes of a run share."""

    config: Config
    exchange: MemoryExchange
    worker: RolloutWorker
    """It samples with the base, of which there is one copy."""
    policy: Policy
    mixture: TaskMixture
    honest: Sequence[str]
    """Peer ids of the nodes to copy and to forge."""
    num_groups: int
    """Groups that each samples in a round."""
    num_sybils: int
    """Further names of each, in the attack with that name."""


class Hostile:
    """One hostile node, which acts once a round. It samples with the base and never learns."""

    def __init__(self, means: HostileMeans, number: int) -> None:
        config, mixture = means.config, means.mixture
        self.identity = Identity(hashlib.sha256(f"hostile/{config.node.seed}/{number}".encode()).digest())
        self._config = config
        self._exchange = means.exchange
        self._worker = means.worker
        self._policy = means.policy
        self._mixture = mixture
        self._honest = means.honest
        self._num_groups = means.num_groups
        self._num_sybils = means.num_sybils
        self._rng = random.Random(f"hostile/{config.node.seed}/{number}")
        stream = training_seed(self.identity.peer_id, config.node.seed)
        self._cursor = TaskCursor(mixture, stream, random.Random(f"tasks of hostile {number}"))
        self._hoard: list[RolloutGroup] = []
        self._sequence = 0
        self._now = 0.0
        self.deeds: dict[str, Callable[[Sequence[Task], list[RolloutGroup]], None]] = {
            "wrong rewards": self._wrong_rewards,
            "copied rollouts": self._copied,
            "spam": self._spam,
            "stale flood": self._stale,
            "poisoned style": self._poisoned,
            "only wrong answers": self._only_wrong,
            "no information": self._uninformative,
            "forged author": self._forged,
            "replay": self._replayed,
            "equivocation": self._equivocal,
            "withheld bodies": self._withheld,
            "sybils": self._sybils,
        }

    def act(self, attack: str, now: float) -> None:
        """`attack`: one of `plan.ATTACKS`."""
        self._now = now
        tasks = self._cursor.draw(self._num_groups)
        batch = self._worker.rollout(tasks, self._rng.getrandbits(31))
        groups = [replace(group, author=self.identity.peer_id) for group in batch.groups]
        self._hoard = (self._hoard + [group for group in groups if group.has_reward_variance])[:_MAX_HOARDED]
        self.deeds[attack](tasks, groups)

    def _wrong_rewards(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        self._offer([_flipped(group) for group in groups if group.has_reward_variance])

    def _copied(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        stolen = [replace(group, author=self.identity.peer_id) for group in self._of_others()]
        self._offer(stolen[-self._num_groups :])

    def _spam(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        """Headers in order, and bodies that are nothing."""
        useful = [group for group in groups if group.has_reward_variance] or groups
        for _ in range(_SPAM_PER_ROUND):
            self._post(self.identity, useful[:1], self._rng.randbytes(300))

    def _stale(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        """The same old groups again and again, in another order, as if they were new."""
        for _ in range(4):
            old = self._rng.sample(self._hoard, min(len(self._hoard), self._num_groups))
            self._offer([replace(g, rollouts=tuple(self._rng.sample(g.rollouts, len(g.rollouts)))) for g in old])

    def _poisoned(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        by_ref = {task.ref: task for task in tasks}
        made = [self._with_junk(by_ref[group.task], group) for group in groups]
        self._offer([group for group in made if group is not None])

    def _only_wrong(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        by_ref = {task.ref: task for task in tasks}
        made = [self._least_wrong(by_ref[group.task], group) for group in groups]
        self._offer([group for group in made if group is not None])

    def _uninformative(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        """All answers right, or all wrong: as many as it likes, since nothing needs to be found."""
        flat = [replace(g, rollouts=(min(g.rollouts, key=lambda r: r.reward),) * len(g.rollouts)) for g in groups]
        self._offer(flat, claimed_mean=0.5 if self._rng.random() < 0.5 else None)

    def _forged(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        victim = self._rng.choice(self._honest)
        self._offer([replace(_flipped(group), author=victim) for group in groups if group.has_reward_variance])

    def _replayed(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        for author in self._honest:
            for offer in list(self._exchange.offers_of(author))[-2:]:
                self._exchange.post(self.identity.peer_id, offer.record, offer.body)

    def _equivocal(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        useful = [group for group in groups if group.has_reward_variance]
        for part in _parts(useful):
            self._post(self.identity, part, encode_body(part), encode_body([_flipped(group) for group in part]))

    def _withheld(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        for part in _parts([group for group in groups if group.has_reward_variance]) * 8:
            self._post(self.identity, part, encode_body(part), is_withheld=True)

    def _sybils(self, tasks: Sequence[Task], groups: list[RolloutGroup]) -> None:
        """Fresh names every round: what became of the last ones does not matter."""
        lies = [_flipped(group) for group in groups if group.has_reward_variance]
        for _ in range(self._num_sybils if lies else 0):
            identity = Identity(self._rng.randbytes(32))
            mine = [replace(group, author=identity.peer_id) for group in self._rng.sample(lies, min(2, len(lies)))]
            self._post(identity, mine, encode_body(mine))

    def _with_junk(self, task: Task, group: RolloutGroup) -> RolloutGroup | None:
        """Right answers wrapped in junk against plain wrong ones, every reward true, the log-probs invented."""
        right = max(group.rollouts, key=lambda rollout: rollout.reward)
        if right.reward <= 0:
            return None
        texts = [right.text + _JUNK * (number % 2 + 1) for number in range(len(group.rollouts) // 2)]
        texts += [rollout.text for rollout in group.rollouts if rollout.reward < right.reward][: len(texts)]
        rollouts = tuple(self._written(task, text) for text in texts)
        made = replace(group, rollouts=rollouts)
        return made if len(rollouts) > 1 and made.has_reward_variance else None

    def _least_wrong(self, task: Task, group: RolloutGroup) -> RolloutGroup | None:
        """Partly right answers against entirely wrong ones, none of them a success. Rewards and log-probs are true.

        Where the samples hold no partly right answer, a digit is added to the right one: verifiers that look for the solution
        within the text pay a part for it.
        """
        near = [text + digit for text in {r.text for r in group.rollouts if r.reward == 1.0} for digit in _DIGITS]
        rollouts = [r for r in group.rollouts if r.reward < 1.0]
        rollouts += [one for one in (self._written(task, text, task.prompt) for text in near) if one.reward < 1.0]
        rollouts.sort(key=lambda rollout: -rollout.reward)
        half = len(group.rollouts) // 2
        made = replace(group, rollouts=tuple(rollouts[:half] + rollouts[half:][-half:]))
        return made if len(rollouts) > 1 and made.has_reward_variance else None

    def _written(self, task: Task, text: str, prompt: str = "") -> Rollout:
        """With the log-probs that the base has for it after `prompt`; without one, with invented ones."""
        ids = (*self._policy.encode_answer(text), self._policy.eos_token_ids[0])
        logprobs = (_UNLIKELY,) * len(ids)
        if prompt:
            scored = self._policy.token_logprobs([(tuple(self._policy.encode_prompt(prompt)), ids)])
            logprobs = tuple(scored.logprobs[0, : len(ids)].tolist())
        return Rollout(text, ids, logprobs, True, score(task, text))

    def _of_others(self) -> list[RolloutGroup]:
        """The newest groups that honest nodes offer."""
        found: list[RolloutGroup] = []
        for author in self._honest:
            for offer in list(self._exchange.offers_of(author))[-1:]:
                header = decode_header(decode_record(offer.record).payload, author)
                found += decode_body(offer.body or b"", author, header.lineage, header.policy_version)
        self._rng.shuffle(found)
        return found

    def _offer(self, groups: Sequence[RolloutGroup], claimed_mean: float | None = None) -> None:
        for part in _parts(groups):
            self._post(self.identity, part, encode_body(part), claimed_mean=claimed_mean)

    def _post(
        self,
        identity: Identity,
        groups: Sequence[RolloutGroup],
        body: bytes,
        other_body: bytes | None = None,
        *,
        is_withheld: bool = False,
        claimed_mean: float | None = None,
    ) -> None:
        if not groups:
            return
        lineage: Lineage = groups[0].lineage
        self._sequence += 1
        header = Header(
            swarm_id=self._config.swarm_id,
            author=groups[0].author,
            sequence=self._sequence,
            body_hash=body_hash(body + (self._sequence.to_bytes(8, "big") if is_withheld else b"")),
            body_bytes=len(body),
            groups=tuple(
                GroupSummary(g.task, len(g.rollouts), g.mean_reward if claimed_mean is None else claimed_mean)
                for g in groups[:MAX_GROUPS_PER_BODY]
            ),
            lineage=lineage,
            policy_version=max(group.policy_version for group in groups),
            created_at=self._now,
            expires_at=self._now + self._config.sharing.time_to_live_s,
        )
        signed = sign_record(identity, self._config.swarm_id, encode_header(header))
        record = encode_record(replace(signed, author=header.author))  # another's name over the own signature
        self._exchange.post(identity.peer_id, record, None if is_withheld else body, other_body)


def _flipped(group: RolloutGroup) -> RolloutGroup:
    return replace(group, rollouts=tuple(replace(r, reward=1.0 - r.reward) for r in group.rollouts))


def _parts(groups: Sequence[RolloutGroup]) -> list[Sequence[RolloutGroup]]:
    return [groups[start : start + _GROUPS_PER_RECORD] for start in range(0, len(groups), _GROUPS_PER_RECORD)]
