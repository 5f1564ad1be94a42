"""Faults in a swarm of light nodes on a virtual clock: honest nodes go on, memory stays bounded, reasons are counted.

Publisher, Reader, Admission, Directory and pool are the real ones; only the rollouts are light.
"""

import contextlib
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import zstandard

from swarm.config import SharingSection
from swarm.network.memory.transport import Faults, MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.records.codec import MAX_UNPACKED_BODY_BYTES, body_hash, encode_body, encode_header, encode_record
from swarm.records.identity import Identity
from swarm.records.signing import sign_record
from swarm.sharing.index import experience_topic
from swarm.sharing.reader import BODY_PROTOCOL
from swarm.simulation.light_node import LightNode, LightRounds
from swarm.simulation.light_rollouts import LINEAGE, light_group
from swarm.simulation.simulation import INTERNET, SWARM_ID, Simulation, SimulationSettings
from swarm.types import GroupSummary, Header

NUM_NODES = 16
ROUNDS = LightRounds(round_s=5.0, swarm_groups=4)
HARMLESS = {"no_signal", "unavailable", "replay"}
"""What loss and duplication may cause among honest nodes."""

Scenario = Callable[[Simulation], Awaitable[None]]


def in_swarm(scenario: Scenario, faults: Faults = INTERNET, seed: int = 1, **sharing: object) -> None:
    settings = SimulationSettings(
        NUM_NODES,
        seed,
        faults,
        ROUNDS,
        SharingSection.model_validate({"swarm_groups": 4, **sharing}),
        join_over_s=2.0,
        verify="cached",
    )

    async def main() -> None:
        simulation = Simulation(settings)
        with simulation.verified():
            await simulation.start()
            await simulation.let(10)
            await scenario(simulation)
        await simulation.stop()

    run(main())


def trained(nodes: list[LightNode]) -> list[int]:
    return [node.num_groups_trained for node in nodes]


async def all_train_on(simulation: Simulation, nodes: list[LightNode], duration_s: float = 20.0) -> None:
    """Each of them trains on groups of others within the time."""
    before = trained(nodes)
    await simulation.let(duration_s)
    assert all(now > then for now, then in zip(trained(nodes), before, strict=True))


def num_held(part: object, seen: set[int]) -> int:
    """Items in all containers that are reachable from `part` through objects of records and sharing."""
    if id(part) in seen:
        return 0
    seen.add(id(part))
    if isinstance(part, dict):
        return len(part) + sum(num_held(value, seen) for value in part.values())
    if isinstance(part, list | set | deque):
        return len(part) + sum(num_held(value, seen) for value in part)
    if type(part).__module__.startswith(("swarm.sharing", "swarm.records", "swarm.simulation.light_node")):
        return num_held(getattr(part, "__dict__", {}), seen)
    return 0


def assert_bounded(nodes: list[LightNode]) -> None:
    """What a node remembers of peers and their messages, whatever they sent."""
    for node in nodes:
        assert isinstance(node.transport, MemoryTransport)
        assert node.transport.gossip.num_remembered() < 12_000
        assert num_held(node.reader, set()) < 12_000
        assert node.pool.num_fresh() <= 512


async def trace_of(seed: int) -> str:
    simulation = Simulation(SimulationSettings(NUM_NODES, seed, Faults(0.1, 0.1, 0.01, (0.01, 0.2)), ROUNDS))
    digest = hashlib.sha256()

    def note(what: str, sender: str, recipient: str, num_bytes: int) -> None:
        digest.update(f"{virtual_now():.9f} {what} {sender} {recipient} {num_bytes}\n".encode())

    simulation.network.observer = note
    await simulation.start()
    await simulation.let(12)
    await simulation.stop()
    digest.update(repr((trained(simulation.nodes), sorted(simulation.rejected().items()))).encode())
    return digest.hexdigest()


def test_one_seed_gives_one_trace() -> None:
    first = run(trace_of(1))
    assert first == run(trace_of(1))
    assert first != run(trace_of(2))


def test_a_third_of_the_nodes_killed_at_once() -> None:
    async def scenario(simulation: Simulation) -> None:
        for node in simulation.nodes[: NUM_NODES // 3]:
            simulation.network.crash(node.peer_id)
        survivors = simulation.nodes[NUM_NODES // 3 :]
        await all_train_on(simulation, survivors)
        assert set(simulation.rejected()) <= HARMLESS
        simulation.spread.begin(virtual_now())
        await simulation.let(20)
        assert max(simulation.spread.times_s(0.95, virtual_now() - 5)) < 3.0

    in_swarm(scenario)


def test_partition_for_a_minute_and_healing() -> None:
    async def scenario(simulation: Simulation) -> None:
        left, right = simulation.nodes[::2], simulation.nodes[1::2]
        simulation.network.partition([n.peer_id for n in left], [n.peer_id for n in right])
        crossed: list[str] = []
        sides = {node.peer_id: number % 2 for number, node in enumerate(simulation.nodes)}

        def note(what: str, sender: str, recipient: str, num_bytes: int) -> None:
            if sides[sender] != sides[recipient]:
                crossed.append(what)

        simulation.network.observer = note
        await all_train_on(simulation, simulation.nodes, 60)
        assert crossed == []
        simulation.network.heal()
        await simulation.let(15)
        assert crossed
        simulation.spread.begin(virtual_now())
        await simulation.let(20)
        assert simulation.spread.coverage(virtual_now() - 5) > 0.99

    in_swarm(scenario)


@pytest.mark.parametrize(
    "faults",
    [Faults(loss=0.2, delay_s=(0.2, 0.2)), Faults(duplication=0.5, delay_s=(0.01, 0.3))],
    ids=["lossy", "duplicating"],
)
def test_bad_lines(faults: Faults) -> None:
    async def scenario(simulation: Simulation) -> None:
        simulation.spread.begin(virtual_now())
        await all_train_on(simulation, simulation.nodes, 30)
        assert simulation.spread.coverage(virtual_now() - 10) > 0.99
        assert set(simulation.rejected()) <= HARMLESS
        assert_bounded(simulation.nodes)

    in_swarm(scenario, faults)


def test_frozen_nodes_and_wrong_clocks_harm_nobody_else() -> None:
    async def scenario(simulation: Simulation) -> None:
        network, nodes = simulation.network, simulation.nodes
        network.freeze(nodes[0].peer_id)
        network.skew_clock(nodes[1].peer_id, 5.0)
        network.skew_clock(nodes[2].peer_id, 3600.0)
        network.limit_uplink(nodes[3].peer_id, 20_000.0)
        await all_train_on(simulation, [nodes[1], *nodes[4:]], 40)
        assert simulation.rejected()["clock_skew"] > 0
        network.thaw(nodes[0].peer_id)
        await all_train_on(simulation, [nodes[0]], 60)

    in_swarm(scenario)


class Mallory:
    """A member with a key of its own that may say anything, in gossip and as a body server."""

    def __init__(self, simulation: Simulation) -> None:
        self.identity = Identity(b"m" * 32)
        self.transport = MemoryTransport(simulation.network, self.identity.peer_id)
        self.bodies: dict[bytes, bytes] = {}
        self.topic = experience_topic(SWARM_ID, simulation.nodes[0].directory.shard)
        self._sequence = 0
        self._rng = simulation.network.rng
        self.transport.serve(BODY_PROTOCOL, self._serve, max_request_bytes=64)

    async def _serve(self, peer_id: str, request: bytes) -> bytes:
        return self.bodies[request]

    def honest(self) -> tuple[Header, bytes]:
        """A header and its body, both in order."""
        self._sequence += 1
        group = light_group(self.identity.peer_id, self._sequence, 4, self._rng)
        body, now = encode_body([group]), virtual_now()
        summary = GroupSummary(group.task, len(group.rollouts), group.mean_reward)
        header = Header(
            SWARM_ID, self.identity.peer_id, self._sequence, body_hash(body), len(body), (summary,), LINEAGE, 0,
            now, now + 600,
        )  # fmt: skip
        return header, body

    def signed(self, header: Header) -> bytes:
        return encode_record(sign_record(self.identity, SWARM_ID, encode_header(header)))

    async def announce(self, header: Header, body: bytes) -> None:
        self.bodies[header.body_hash] = body
        await self.transport.publish(self.topic, self.signed(header))


@contextlib.asynccontextmanager
async def mallory_in(simulation: Simulation):
    mallory = Mallory(simulation)
    await mallory.transport.start()
    yield mallory
    await mallory.transport.stop()


def bomb() -> bytes:
    """A small frame that unpacks to more than is allowed."""
    return zstandard.ZstdCompressor(write_content_size=True).compress(bytes(MAX_UNPACKED_BODY_BYTES + 1))


Deed = Callable[[Mallory], Awaitable[None]]


async def garbage(mallory: Mallory) -> None:
    await mallory.transport.publish(mallory.topic, mallory._rng.randbytes(300))


async def forgery(mallory: Mallory) -> None:
    header, _ = mallory.honest()
    record = mallory.signed(header)
    await mallory.transport.publish(mallory.topic, record[:-1] + bytes([record[-1] ^ 1]))


async def future(mallory: Mallory) -> None:
    header, body = mallory.honest()
    await mallory.announce(
        replace(header, created_at=header.created_at + 3600, expires_at=header.expires_at + 3600), body
    )


async def compression_bomb(mallory: Mallory) -> None:
    header, _ = mallory.honest()
    body = bomb() + mallory._rng.randbytes(4)
    await mallory.announce(replace(header, body_hash=body_hash(body), body_bytes=len(body)), body)


async def wrong_hash(mallory: Mallory) -> None:
    header, body = mallory.honest()
    await mallory.announce(header, body[:-1] + bytes([body[-1] ^ 1]))


async def oversize_body(mallory: Mallory) -> None:
    header, body = mallory.honest()
    await mallory.announce(header, body + bytes(100_000))


async def false_reward(mallory: Mallory) -> None:
    header, _ = mallory.honest()
    group = light_group(mallory.identity.peer_id, mallory._sequence, 4, mallory._rng)
    group = replace(group, rollouts=tuple(replace(r, reward=1.0 - r.reward) for r in group.rollouts))
    summary = GroupSummary(group.task, 4, group.mean_reward)
    body = encode_body([group])
    await mallory.announce(replace(header, body_hash=body_hash(body), body_bytes=len(body), groups=(summary,)), body)


@pytest.mark.parametrize(
    ("deed", "reasons"),
    [
        (garbage, {"malformed"}),
        (forgery, {"bad_signature"}),
        (future, {"clock_skew"}),
        (compression_bomb, {"oversize"}),
        (wrong_hash, {"wrong_hash"}),
        (oversize_body, {"unavailable"}),
        (false_reward, {"reward_mismatch"}),
    ],
)
def test_a_hostile_peer_is_counted_and_the_others_train_on(deed: Deed, reasons: set[str]) -> None:
    async def scenario(simulation: Simulation) -> None:
        async with mallory_in(simulation) as mallory:
            before = trained(simulation.nodes)
            for _ in range(100):
                await deed(mallory)
                await simulation.let(0.2)
            assert reasons <= set(simulation.rejected())
            assert set(simulation.rejected()) <= reasons | HARMLESS
            assert all(now > then for now, then in zip(trained(simulation.nodes), before, strict=True))
            assert_bounded(simulation.nodes)

    in_swarm(scenario)


def test_ten_thousand_headers_per_second_of_one_author() -> None:
    async def scenario(simulation: Simulation) -> None:
        async with mallory_in(simulation) as mallory:
            before = trained(simulation.nodes)
            header, _ = mallory.honest()
            for number in range(10_000):
                nonce = hashlib.sha256(b"%d" % number).digest()
                await mallory.transport.publish(mallory.topic, mallory.signed(replace(header, body_hash=nonce)))
            await simulation.let(1)
            assert simulation.rejected()["rate"] > 0
            assert sum(node.transport.gossip.num_dropped for node in simulation.nodes) > 1000  # pyright: ignore
            assert_bounded(simulation.nodes)
            await simulation.let(10)
            assert all(now > then for now, then in zip(trained(simulation.nodes), before, strict=True))

    in_swarm(scenario)
