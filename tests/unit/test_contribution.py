"""What a node says of its own part and of its peers: facts of two exchanges over one memory network."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from swarm.config import NetworkSection, SharingSection
from swarm.network.context import NodeContext
from swarm.network.memory.network import MemoryNetwork
from swarm.network.memory.transport import MemoryTransport
from swarm.node.report import ALONE_AFTER_S, LEAST_FREE_BYTES, Adviser
from swarm.observability.status_file import NodeStatus, read_status
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity, peer_name
from swarm.records.rejection import Rejection
from swarm.sharing.body_store import BodyStore
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator
from swarm.sharing.parts import contribution, peer_standings
from swarm.sharing.peer_tracker import MAX_PEERS, REWARD_WINDOW_S, PeerStats
from swarm.sharing.reputation import Reputation
from swarm.sharing.totals import SharingPause
from swarm.types import RolloutGroup
from tests.unit.experience_factory import (
    ALICE,
    LINEAGE,
    MALLORY,
    NOW,
    READER,
    SWARM_ID,
    Clock,
    admission,
    body_and_header,
    group,
    sharing_parts,
)


class Member:
    """All that a node shares with, without a policy."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        sharing = SharingSection()
        self.transport = MemoryTransport(network, identity.peer_id, EntryValidator(SWARM_ID), request_timeout_s=5)
        context = NodeContext.of(identity, SWARM_ID, self.transport)
        self.parts = sharing_parts(sharing, context)
        self.exchange = Exchange(
            sharing,
            NetworkSection(request_timeout_s=5, poll_interval_s=0.05),
            self.parts,
            admission=admission(context),
            pool=ExperiencePool(":memory:", sharing, network.clock),
            rng=random.Random(0),
        )

    async def share(self, groups: list[RolloutGroup]) -> None:
        self.exchange.hand_out(groups)
        await self.exchange._publish_next()


async def two() -> tuple[Clock, Member, Member]:
    clock = Clock()
    network = MemoryNetwork(random.Random(0), clock)
    alice, reader = Member(network, ALICE), Member(network, READER)
    for member in (alice, reader):
        await member.transport.start()
        await member.parts.directory.turn()
        member.exchange.reader._follow_shard()
    async with asyncio.timeout(10):
        while not all(map(hears_somebody, (alice, reader))):
            await asyncio.sleep(0.001)  # a message of the network's is on its way
    return clock, alice, reader


def hears_somebody(member: Member) -> bool:
    gossip = member.transport.gossip
    return any(gossip.mesh(topic) for topic in gossip.topics())


async def test_a_body_that_another_node_fetched_is_told_with_who_and_when() -> None:
    clock, alice, reader = await two()
    assert alice.parts.contribution().last_taken_at is None
    await alice.share([group(index=i) for i in range(3)])
    clock.now += 5
    await reader.exchange.reader.poll()
    told = alice.parts.contribution()
    assert (told.bodies_taken, told.last_taken_by, told.last_taken_at) == (1, READER.peer_id, NOW + 5)
    assert {peer.peer_id: peer.bodies_taken for peer in alice.parts.peers()}[READER.peer_id] == 1
    assert reader.parts.contribution().bodies_taken == 0, "a body of another that is passed on is no contribution"


async def test_what_was_admitted_of_a_peer_is_told_with_the_rewards_recomputed_here() -> None:
    clock, alice, reader = await two()
    await alice.share([group("right", "wrong", index=0), group("right", "right", "right", "wrong", index=1)])
    clock.now += 5
    await reader.exchange.reader.poll()
    (peer,) = reader.parts.peers()
    weight = round(reader.parts.tracker.reputation.weight(ALICE.peer_id), 3)
    assert weight > 0.5
    assert asdict(peer) == {
        "peer_id": ALICE.peer_id, "name": peer_name(ALICE.peer_id), "lineage": LINEAGE.policy, "weight": weight,
        "banned_until": 0.0, "groups_admitted": 2, "bodies_taken": 0, "records_rejected": 0, "last_seen_at": NOW + 5,
        "reward_mean": 0.625, "policy_version": 7,
    }  # fmt: skip
    (taker,) = alice.parts.peers()
    told = (taker.peer_id, taker.bodies_taken, taker.last_seen_at, taker.lineage)
    assert told == (READER.peer_id, 1, NOW + 5, ""), "who only fetches is listed, too"
    await alice.parts.directory.turn()
    assert [one.peer_id for one in alice.parts.peers()] == [READER.peer_id], "listed, though it shared nothing"


async def test_a_withheld_body_counts_against_the_peer_in_the_list() -> None:
    clock, alice, reader = await two()
    await alice.share([group()])
    alice.parts.bodies._remove(next(iter(alice.parts.bodies._authors)))
    clock.now += 5
    await reader.exchange.reader.poll()
    (peer,) = reader.parts.peers()
    assert (peer.groups_admitted, peer.records_rejected, peer.reward_mean) == (0, 1, None)


def acquainted(clock: Clock, own: int, **others: tuple[Identity, list[str]]) -> PeerStats:
    known = PeerStats(clock)
    known.shared([group("right", "wrong", index=i) for i in range(own)])
    for author, answers in others.values():
        groups = [group(*answers, index=i, author=author.peer_id) for i in range(4)]
        _, header = body_and_header(*groups)
        known.admitted(header, groups, len(groups))
    return known


def test_the_rank_is_among_those_of_whom_enough_was_admitted_of_late() -> None:
    clock = Clock()
    better = (ALICE, ["right", "right", "wrong"])
    known = acquainted(clock, 4, better=better)
    told = contribution(BodyStore(clock, 1 << 20), known, clock())
    assert (told.reward_rank, told.reward_rank_of) == (2, 2)
    few = contribution(BodyStore(clock, 1 << 20), acquainted(clock, 3, better=better), clock())
    assert (few.reward_rank, few.reward_rank_of) == (None, 0), "three own groups say nothing"
    clock.now += REWARD_WINDOW_S + 1
    known.shared([group(index=i) for i in range(4)])
    later = contribution(BodyStore(clock, 1 << 20), known, clock())
    assert later.reward_rank is None, "the other's rewards are of long ago"


def test_peers_are_bounded_and_names_that_cost_nothing_push_nobody_out() -> None:
    clock = Clock()
    known = acquainted(clock, 0, honest=(ALICE, ["right", "wrong"]))
    for number in range(3 * MAX_PEERS):
        clock.now += 1
        known.seen(f"stranger-{number}")
    told = peer_standings(known, Reputation(600, clock))
    assert len(told) == MAX_PEERS
    assert ALICE.peer_id in {peer.peer_id for peer in told}
    assert [peer.last_seen_at for peer in told] == sorted((peer.last_seen_at for peer in told), reverse=True)


def test_where_nobody_looks_nothing_is_kept() -> None:
    known = PeerStats(Clock(), max_peers=0)
    known.seen(ALICE.peer_id)
    assert known.last_seen_first() == []


def test_a_peer_banned_in_an_earlier_process_is_listed(tmp_path: Path) -> None:
    clock = Clock()
    before = Reputation(600, clock, tmp_path / "reputation.json")
    while not before.refused(MALLORY.peer_id, Rejection.REWARD_MISMATCH):
        pass
    before.save()
    now = Reputation(600, clock, tmp_path / "reputation.json")
    (peer,) = peer_standings(PeerStats(clock), now)
    assert (peer.peer_id, peer.banned_until) == (MALLORY.peer_id, NOW + 600)
    assert peer.weight < 0.3


def test_a_status_of_another_version_is_read(tmp_path: Path) -> None:
    old = {"peer_id": "12D3x", "peer_name": "n", "pid": 1, "started_at": 1.0, "phase": "learning", "addresses": ["a"]}
    (tmp_path / "status.json").write_text(json.dumps({**old, "of_a_later_version": 1}))
    told = read_status(tmp_path / "status.json")
    assert told == NodeStatus("12D3x", "n", 1, 1.0, "learning", addresses=("a",))
    assert told.peers == [] and told.contribution == {}


class Situation:
    """A node's last minutes, played to its adviser."""

    def __init__(self, **facts: bool) -> None:
        self.clock = Clock(0.0)
        self.adviser = Adviser(self.clock, **({"has_network": True, "has_initial_peers": True} | facts))

    def advice(self, num_peers: int = 1, admitted: int = 0, free_bytes: int = 1 << 40, **rejected: int) -> list[str]:
        return self.adviser.look(num_peers, admitted, Counter(rejected), free_bytes)


def test_a_healthy_node_gets_no_advice() -> None:
    healthy = Situation()
    for minute in range(30):
        healthy.clock.now = 60.0 * minute
        row = {"rollout/groups": 4, "rollout/groups_with_signal": 0 if minute % 5 else 1, "rollout/reward_mean": 0.1}
        healthy.adviser.round_done(row)
        assert healthy.advice(admitted=minute, replay=50 * minute, no_signal=9 * minute, tokens=2 * minute) == []


def test_nobody_to_talk_to_is_told_after_a_while_and_no_longer_once_somebody_came() -> None:
    alone, first = Situation(), Situation(has_initial_peers=False)
    assert alone.advice(0) == []
    alone.clock.now = first.clock.now = ALONE_AFTER_S + 60
    assert "no peer for 3 min: `swarm doctor`" in alone.advice(0)[0]
    assert "give others an address" in first.advice(0)[0]
    assert alone.advice(1) == []
    off = Situation(has_network=False)
    off.clock.now = 1e6
    assert off.advice(0) == []


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("clock_skew", "NTP"),
        ("unknown_task", "tasks.sources"),
        ("task_mismatch", "versions"),
        ("copied", "protocol.md"),
    ],
)
def test_where_nothing_is_admitted_the_commonest_reason_is_told_with_its_remedy(reason: str, told: str) -> None:
    refusing = Situation()
    (line,) = refusing.advice(admitted=0, replay=99, tokens=3, **{reason: 20})
    assert f"nothing of others admitted lately, 23 turned away, 20 of them as {reason}" in line and told in line
    partly = refusing.advice(admitted=40, **{reason: 20})
    if reason == "copied":
        assert partly == [], "what anybody can cause is no news while others are admitted"
    else:
        assert partly[0].startswith("40 records of others admitted lately, 20 turned away")
    assert refusing.advice(admitted=41, **{reason: 20}) == [], "most of what came was admitted"


def test_a_swarm_that_worked_once_and_is_refused_now_is_told() -> None:
    turned = Situation()
    for minute in range(20):
        turned.clock.now = 60.0 * minute
        lines = turned.advice(admitted=min(50, 10 * minute), clock_skew=max(0, 3 * (minute - 5)))
    assert "clock" in lines[0]


def test_a_full_disk_comes_first_and_rounds_without_signal_are_counted_in_a_row() -> None:
    bad = Situation()
    for _ in range(10):
        bad.adviser.round_done({"rollout/groups": 4, "rollout/groups_with_signal": 0, "health/warnings": ["entropy"]})
    first, second, third = bad.advice(free_bytes=LEAST_FREE_BYTES - 2**20)
    assert "1023 MiB free" in first and "no signal in 10 rounds" in second and third == "entropy"
    bad.adviser.round_done({"rollout/groups": 4, "rollout/groups_with_signal": 1})
    assert bad.advice() == []


async def test_rounds_that_waited_when_sharing_was_paused_are_not_published_after_it() -> None:
    _, alice, _ = await two()
    pause, totals = alice.parts.pause, alice.parts.totals
    alice.exchange.hand_out([group(index=1)])
    pause.pause()
    alice.exchange.hand_out([group(index=2)])
    pause.resume()
    alice.exchange.hand_out([group(index=3)])
    await alice.exchange._publish_next()
    assert totals.num_published == 0, "the first round is too old, and the second was refused"
    await alice.exchange._publish_next()
    assert totals.num_published == 1


async def test_a_step_is_held_while_sharing_is_paused_by_another_thread_and_broken_off_when_a_pause_begins() -> None:
    pause, begun, num_steps = SharingPause(), asyncio.Event(), 0

    async def step() -> None:
        nonlocal num_steps
        num_steps += 1
        begun.set()
        await asyncio.Event().wait()

    held = pause.held(step)
    pause.pause()
    first = asyncio.ensure_future(held())
    await asyncio.sleep(0)
    assert num_steps == 0
    await asyncio.to_thread(pause.resume)
    async with asyncio.timeout(10):
        await begun.wait()
        await asyncio.to_thread(pause.pause)
        await first
    assert num_steps == 1
