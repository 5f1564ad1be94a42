"""One hostile node: names of its own, a copy of the base to sample with, and means to sign and post what it likes."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarm.config import Config
from swarm.experiments.memory_exchange import MemoryExchange
from swarm.extensions.points import ATTACKS
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
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.tasks.task_source import score
from swarm.types import GroupSummary, Header, Rollout, RolloutGroup, Task

_GROUPS_PER_RECORD = 4
_UNLIKELY = -12.0
"""Claimed log-prob of invented tokens: so unlikely that no correction by importance weights holds them back."""
_MAX_HOARDED = 64


@dataclass(frozen=True, slots=True)
class HostileSetup:
    """What all hostile nodes of a cell share."""

    config: Config
    exchange: MemoryExchange
    worker: RolloutWorker
    policy: Policy
    """The base, which never learns."""
    mixture: TaskMixture
    honest: Sequence[str]
    """Peer ids of the honest nodes."""
    num_groups: int
    """Groups that each hostile node samples in a round."""
    num_sybils: int
    """Names that one hostile node takes in a round, in the attack of that name."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind of attack. One object in a file, and one line in `swarm/extensions/points.py`."""

    send: "Callable[[HostileNode, Sequence[Task], list[RolloutGroup]], None]"
    """(node, tasks of this round, its own honest groups for them): posts what the attack says."""
    rejected_as: frozenset[str]
    """Reasons by which a defended reader refuses it, of which at least one shows; empty where other defences catch it."""
    admits_bodies: bool
    """Whether a defended reader admits some of its bodies, because each of them is in order."""


class HostileNode:
    """A node that does `act` once a round. It samples by the base and never learns."""

    def __init__(self, setup: HostileSetup, number: int) -> None:
        seed = setup.config.node.seed
        self.setup = setup
        self.identity = Identity(hashlib.sha256(f"hostile/{seed}/{number}".encode()).digest())
        self.rng = random.Random(f"hostile/{seed}/{number}")
        stream = training_seed(self.identity.peer_id, seed)
        self._cursor = TaskCursor(setup.mixture, stream, random.Random(f"tasks of hostile {number}"))
        self.hoard: list[RolloutGroup] = []
        """Its newest groups with differing rewards."""
        self._sequence = 0
        self._now = 0.0

    def act(self, attack: str, now: float) -> None:
        """`attack`: a name in `points.ATTACKS`."""
        self._now = now
        tasks = self._cursor.draw(self.setup.num_groups)
        batch = self.setup.worker.rollout(tasks, self.rng.getrandbits(31))
        groups = [replace(group, author=self.identity.peer_id) for group in batch.groups]
        self.hoard = (self.hoard + with_variance(groups))[:_MAX_HOARDED]
        chosen: Attack = ATTACKS.load(attack)
        chosen.send(self, tasks, groups)

    def written(self, task: Task, text: str, prompt: str = "") -> Rollout:
        """An answer with the log-probs that the base gives it after `prompt`; without one, with invented log-probs."""
        policy = self.setup.policy
        ids = (*policy.encode_answer(text), policy.end_token_id)
        logprobs = (_UNLIKELY,) * len(ids)
        if prompt:
            scored = policy.token_logprobs([(tuple(policy.encode_prompt(prompt)), ids)])
            logprobs = tuple(scored.logprobs[0, : len(ids)].tolist())
        return Rollout(text, ids, logprobs, True, 0.0 if task.begin else score(task, text))

    def groups_of_others(self) -> list[RolloutGroup]:
        """The newest groups that honest nodes offer, in random order."""
        found: list[RolloutGroup] = []
        for author in self.setup.honest:
            for offer in list(self.setup.exchange.offers_of(author))[-1:]:
                header = decode_header(decode_record(offer.record).payload, author)
                found += decode_body(offer.body or b"", author, header.lineage, header.policy_version)
        self.rng.shuffle(found)
        return found

    def offer(self, groups: Sequence[RolloutGroup], claimed_mean: float | None = None) -> None:
        """Post groups as an honest node does, a few per record. `claimed_mean` stands in the header in place of the true one."""
        for part in parts(groups):
            self.post(self.identity, part, encode_body(part), claimed_mean=claimed_mean)

    def post(
        self,
        identity: Identity,
        groups: Sequence[RolloutGroup],
        body: bytes,
        other_body: bytes | None = None,
        *,
        is_withheld: bool = False,
        claimed_mean: float | None = None,
    ) -> None:
        """Post one record, signed by `identity` in the name of the groups' author. Half of the readers get `other_body`."""
        if not groups:
            return
        config, lineage = self.setup.config, groups[0].lineage
        self._sequence += 1
        header = Header(
            swarm_id=config.swarm_id,
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
            expires_at=self._now + config.sharing.time_to_live_s,
        )
        signed = sign_record(identity, config.swarm_id, encode_header(header))
        record = encode_record(replace(signed, author=header.author))  # another's name over the own signature
        self.setup.exchange.post(identity.peer_id, record, None if is_withheld else body, other_body)


def with_variance(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups whose rewards differ."""
    return [group for group in groups if group.has_reward_variance]


def with_wrong_rewards(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups whose rewards differ, with every reward r claimed to be 1 − r."""
    return [
        replace(group, rollouts=tuple(replace(r, reward=1.0 - r.reward) for r in group.rollouts))
        for group in with_variance(groups)
    ]


def parts(groups: Sequence[RolloutGroup]) -> list[Sequence[RolloutGroup]]:
    """The groups of each record."""
    return [groups[start : start + _GROUPS_PER_RECORD] for start in range(0, len(groups), _GROUPS_PER_RECORD)]
