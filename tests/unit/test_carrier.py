"""A carrier passes on what is valid in every shard, without tasks or bodies, and nothing that a node would hold against it."""

import asyncio
import random
from dataclasses import replace

import pytest

from swarm.config import SharingSection
from swarm.network.context import NodeContext
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import EPOCH_S, run, virtual_now
from swarm.network.transport import Contact, ValidationResult
from swarm.records.codec import encode_body
from swarm.records.identity import Identity
from swarm.records.presence import Presence, sign_presence
from swarm.sharing.directory import PRESENCE_INTERVAL_S, Directory
from swarm.sharing.header_relay import MAX_SHARDS, HeaderRelay, shards_to_relay
from swarm.sharing.index import Shard, experience_topic, presence_key, shard_of, thinning_depth
from swarm.sharing.totals import SharingTotals
from tests.unit.experience_factory import ALICE, MALLORY, READER, SWARM_ID, Clock, group, header_of, signed

EVERYBODY = Shard(0, 0)
CARRIER = Identity(b"c" * 32)


class Homes(MemoryNetwork):
    """Nobody reaches anybody but the carrier, which reaches all."""

    def connected(self, one: str, other: str) -> bool:
        return super().connected(one, other) and CARRIER.peer_id in (one, other)


def record(author: Identity = ALICE, seed: int = 99, source: str = "spelling", **changes: object) -> bytes:
    one = group(author=author.peer_id)
    groups = [replace(one, task=replace(one.task, seed=seed, source=source))]
    times = {"created_at": EPOCH_S, "expires_at": EPOCH_S + 600}
    return signed(header_of(groups, encode_body(groups), author=author.peer_id, **(times | changes)), author)


async def carrier_on(
    network: MemoryNetwork, **settings: object
) -> tuple[HeaderRelay, MemoryTransport, asyncio.Task[None]]:
    transport = MemoryTransport(network, CARRIER.peer_id)
    carrier = HeaderRelay(SharingSection.model_validate(settings), NodeContext.of(CARRIER, SWARM_ID, transport))
    work = asyncio.create_task(carrier.work(lambda: None))
    await transport.start()
    return carrier, transport, work


async def stop(work: asyncio.Task[None], *transports: MemoryTransport) -> None:
    work.cancel()
    await asyncio.gather(work, *(one.stop() for one in transports), return_exceptions=True)


def test_headers_reach_homes_through_a_carrier_alone() -> None:
    heard: list[tuple[str, bytes]] = []

    def take(forwarder: str, message: bytes) -> ValidationResult:
        heard.append((forwarder, message))
        return ValidationResult.ACCEPT

    async def main() -> None:
        network = Homes(random.Random(0), virtual_now)
        author, reader = MemoryTransport(network, ALICE.peer_id), MemoryTransport(network, READER.peer_id)
        carrier, transport, work = await carrier_on(network)
        for node in (author, reader):
            await node.start()
            node.subscribe(experience_topic(SWARM_ID, EVERYBODY), take)
        await asyncio.sleep(5)
        await author.publish(experience_topic(SWARM_ID, EVERYBODY), record())
        await author.publish(experience_topic(SWARM_ID, EVERYBODY), b"garbage")
        await asyncio.sleep(5)
        assert heard == [(CARRIER.peer_id, record())]
        assert (carrier.num_relayed, carrier.rejected) == (1, {"malformed": 1})
        await stop(work, transport, author, reader)

    run(main())


@pytest.mark.parametrize(
    ("message", "verdict", "reason"),
    [
        (b"garbage", ValidationResult.REJECT, "malformed"),
        (record()[:-1] + b"x", ValidationResult.REJECT, "bad_signature"),
        (record(swarm_id="cd" * 16), ValidationResult.REJECT, "foreign_swarm"),
        (record(seed=1), ValidationResult.REJECT, "held_out_task"),
        (record(created_at=EPOCH_S - 700, expires_at=EPOCH_S - 100), ValidationResult.IGNORE, "expired"),
        (record(created_at=EPOCH_S + 60), ValidationResult.IGNORE, "clock_skew"),
        (record(source="elsewhere"), ValidationResult.ACCEPT, None),
    ],
)
def test_what_needs_no_tasks_is_judged_as_a_node_would(
    message: bytes, verdict: ValidationResult, reason: str | None
) -> None:
    async def main() -> None:
        carrier, transport, work = await carrier_on(MemoryNetwork(random.Random(0), virtual_now))
        judge = carrier._handler(EVERYBODY)
        assert judge(ALICE.peer_id, message) is verdict
        assert judge(ALICE.peer_id, message) is ValidationResult.IGNORE
        assert carrier.rejected == ({reason: 1} if reason else {})
        assert carrier.num_relayed == (verdict is ValidationResult.ACCEPT)
        await stop(work, transport)

    run(main())


def test_whoever_sends_a_header_in_another_shard_first_does_not_keep_it_from_its_own() -> None:
    async def main() -> None:
        carrier, transport, work = await carrier_on(MemoryNetwork(random.Random(0), virtual_now))
        own = shard_of(SWARM_ID, ALICE.peer_id, 1, virtual_now())
        judge = {place: carrier._handler(place) for place in (EVERYBODY, own, Shard(1, own.number ^ 1))}
        verdicts = [judge[place](MALLORY.peer_id, record()) for place in (Shard(1, own.number ^ 1), EVERYBODY)]
        assert verdicts == [ValidationResult.REJECT, ValidationResult.ACCEPT]
        assert judge[own](ALICE.peer_id, record()) is ValidationResult.ACCEPT
        assert judge[own](ALICE.peer_id, record()) is ValidationResult.IGNORE
        await stop(work, transport)

    run(main())


def test_an_author_s_rate_and_shard_are_checked_too() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(0), virtual_now)
        carrier, transport, work = await carrier_on(network, max_records_per_peer_per_minute=2)
        right = shard_of(SWARM_ID, MALLORY.peer_id, 3, virtual_now())
        wrong = Shard(3, right.number ^ 1)
        assert carrier._handler(wrong)(ALICE.peer_id, record(MALLORY)) is ValidationResult.REJECT
        judge, body = carrier._handler(EVERYBODY), encode_body([group()])
        headers = [
            header_of([group()], body + bytes([n]), created_at=EPOCH_S, expires_at=EPOCH_S + 9) for n in range(4)
        ]
        verdicts = [judge(READER.peer_id, signed(header)) for header in headers]
        assert verdicts == [
            ValidationResult.ACCEPT,
            ValidationResult.ACCEPT,
            ValidationResult.IGNORE,
            ValidationResult.IGNORE,
        ]
        assert carrier.rejected == {"wrong_slot": 1, "rate": 2}
        await stop(work, transport)

    run(main())


def test_a_carrier_is_listed_for_newcomers_and_joins_the_shards_of_those_listed() -> None:
    async def main() -> None:
        network = MemoryNetwork(random.Random(0), virtual_now)
        carrier, transport, work = await carrier_on(network)
        assert carrier.shards == {EVERYBODY}
        newcomer = MemoryTransport(network, READER.peer_id)
        met: list[Contact] = []
        newcomer.meet = met.append  # type: ignore[method-assign]
        await newcomer.start()
        directory = Directory(NodeContext.of(READER, SWARM_ID, newcomer), SharingTotals(Clock(), reads=False))
        await asyncio.sleep(PRESENCE_INTERVAL_S)
        await directory.turn()
        assert {contact.peer_id for contact in met} == {CARRIER.peer_id}
        for identity in listed_above(2)[:3]:
            said = Presence(identity.peer_id, (), (), False, 2, virtual_now(), virtual_now() + 120)
            key = presence_key(SWARM_ID, EVERYBODY)
            assert await newcomer.store(
                key, identity.peer_id, sign_presence(identity, SWARM_ID, said), virtual_now() + 120
            )
        await asyncio.sleep(PRESENCE_INTERVAL_S)
        assert carrier.shards == {EVERYBODY, *(Shard(2, number) for number in range(4))}
        await stop(work, transport, newcomer)

    run(main())


def listed_above(num_levels: int) -> list[Identity]:
    """Nodes that are listed in wider shards so many levels above their own."""
    crowd = [Identity(number.to_bytes(32, "big")) for number in range(1, 100)]
    return [one for one in crowd if thinning_depth(SWARM_ID, one.peer_id) >= num_levels]


def test_shards_are_bounded_the_widest_and_the_usual_level_come_first_and_carriers_share_the_rest_out() -> None:
    assert shards_to_relay(SWARM_ID, ALICE.peer_id, {}) == {EVERYBODY}
    assert shards_to_relay(SWARM_ID, ALICE.peer_id, {1: 5, 2: 9}) == {
        EVERYBODY, *(Shard(2, number) for number in range(4)), Shard(1, 0), Shard(1, 1),
    }  # fmt: skip
    crowded = shards_to_relay(SWARM_ID, ALICE.peer_id, {8: 100, 16: 3, 1: 99})
    assert len(crowded) == MAX_SHARDS and {shard.level for shard in crowded} == {0, 8}
    others = [shards_to_relay(SWARM_ID, Identity(bytes([n]) * 32).peer_id, {8: 1}) for n in range(40)]
    assert len(set().union(*others)) > 200
