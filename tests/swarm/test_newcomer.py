"""A newcomer gets adapters of several donors, or none; donors give theirs to one newcomer at a time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from swarm.errors import RequestError
from swarm.merging.exchange.adapter_donor import PAUSE_S, PLACES, RELIST_S, STARTER_PROTOCOL, AdapterDonor
from swarm.merging.exchange.newcomer import COUNT, LEAST, Newcomer, WantedAdapter
from swarm.merging.exchange.proposal import MAX_LAG_ROUNDS
from swarm.network.context import NodeContext
from swarm.network.memory.network import MemoryNetwork
from swarm.network.memory.transport import MemoryTransport
from swarm.network.memory.virtual_clock import run
from swarm.network.requests.blob_protocol import BlobRequest, sha256
from swarm.observability.repeat import repeat
from swarm.records.adapter_offer import AdapterOffer
from swarm.records.identity import Identity
from swarm.sharing.index import EntryValidator
from swarm.types import Partner, Snapshot
from tests.swarm.merge_swarm import SMALL, TIMEOUTS, network_of
from tests.unit.experience_factory import LINEAGE, SWARM_ID

WANTED = WantedAdapter(LINEAGE.policy, "bf16", SMALL)


class Node:
    """Gives its adapter, and could be a newcomer itself."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.number = number
        identity, rng = Identity(number.to_bytes(32, "big")), random.Random(number)
        self.transport = MemoryTransport(network, identity.peer_id, EntryValidator(SWARM_ID))
        self.context = context = NodeContext.of(identity, SWARM_ID, self.transport)
        self.donor = AdapterDonor(TIMEOUTS, context, rng=rng)
        self.newcomer = Newcomer(TIMEOUTS, context, rng=rng)

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    def snapshot(self, num_bytes: int = SMALL, **changes: Any) -> Snapshot:
        fields = {"lineage": LINEAGE.policy, "precision": "bf16", "outer_round": 7, "policy_version": self.number}
        payload = random.Random(self.number).randbytes(num_bytes)
        return Snapshot(**({"payload": payload} | fields | changes))  # type: ignore[arg-type]

    async def give(self, **changes: Any) -> None:
        self.donor.keep(self.snapshot(**changes))
        await asyncio.sleep(2)


@contextlib.asynccontextmanager
async def donors(count: int) -> AsyncIterator[tuple[list[Node], MemoryNetwork]]:
    network = network_of()
    nodes = [Node(network, number) for number in range(count)]
    for node in nodes:
        await node.transport.start()
    tasks = [
        asyncio.create_task(repeat(node.donor.step, "offer the adapter", on_failure=lambda: None)) for node in nodes
    ]
    await asyncio.sleep(0.1)
    try:
        yield nodes, network
    finally:
        for task in tasks:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in nodes:
            await node.transport.stop()


def among_donors(count: int, scenario: Callable[[list[Node], MemoryNetwork], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with donors(count) as (nodes, network):
            await scenario(nodes, network)

    run(main())


def names(found: list[Partner]) -> set[str]:
    return {partner.peer_id for partner in found}


def test_newcomer_gets_what_different_donors_gave() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        newcomer, *others = nodes
        for node in others:
            await node.give()
        found = await newcomer.newcomer.fetch(WANTED)
        given = {node.peer_id: node.snapshot() for node in others}
        assert len(names(found)) == len(found) == COUNT
        assert all(partner.snapshot == given[partner.peer_id] for partner in found)

    among_donors(9, scenario)


def test_adapters_that_do_not_fit_and_those_of_another_time_are_left_out() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        newcomer, *others = nodes
        for node in others[:3]:
            await node.give()
        await others[3].give(outer_round=7 + MAX_LAG_ROUNDS + 1)
        await others[4].give(precision="int8")
        await others[5].give(num_bytes=SMALL + 1)
        await others[6].give(lineage="33" * 16)
        assert names(await newcomer.newcomer.fetch(WANTED, 10)) == {node.peer_id for node in others[:3]}

    among_donors(8, scenario)


def test_too_few_are_none() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        assert await nodes[0].newcomer.fetch(WANTED) == []
        for node in nodes[1:LEAST]:
            await node.give()
        assert await nodes[0].newcomer.fetch(WANTED) == []
        assert not any(node.donor.num_guests for node in nodes)  # and nobody is asked for nothing

    among_donors(LEAST, scenario)


def test_copies_and_donors_of_one_network_count_once() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        newcomer, *others = nodes
        for node in others[:3]:
            await node.give()
        for node in others[3:]:
            await node.give(payload=others[0].snapshot().payload)
        found = await newcomer.newcomer.fetch(WANTED, 10)
        assert len(found) == len({partner.snapshot.payload for partner in found}) == 3
        await asyncio.sleep(PAUSE_S)
        crowded = Newcomer(TIMEOUTS, newcomer.context, rng=random.Random(0), network_of=lambda peer_id: "192.0.2")
        assert await crowded.fetch(WANTED) == []

    among_donors(8, scenario)


def test_silent_and_lying_donors_are_passed_over() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        newcomer, *others = nodes
        for node in others:
            await node.give()
        network.freeze(others[0].peer_id)
        network.crash(others[1].peer_id)
        digest = await sha256(others[2].snapshot().payload)
        others[2].donor._given = digest, bytes(SMALL)
        others[3].donor._given = digest, bytes(SMALL)
        assert names(await newcomer.newcomer.fetch(WANTED, 8)) == {node.peer_id for node in others[4:]}

    among_donors(8, scenario)


async def ask(node: Node, donor: Node, digest: bytes, length: int = SMALL) -> bytes:
    request = BlobRequest(digest, 0, length).encode()
    return await node.transport.request(
        donor.peer_id, STARTER_PROTOCOL, request, max_response_bytes=SMALL, deadline_s=5.0
    )


async def refusal_of(node: Node, donor: Node, digest: bytes) -> str:
    try:
        await ask(node, donor, digest)
    except RequestError as error:
        return str(error)
    return ""


def test_few_newcomers_at_a_time_and_a_bounded_number_of_bytes() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        donor, one, other, third = nodes
        await donor.give()
        payload = donor.snapshot().payload
        digest = await sha256(payload)
        assert await ask(one, donor, digest) == await ask(other, donor, digest) == payload
        assert "busy" in await refusal_of(third, donor, digest)
        assert "unknown adapter" in await refusal_of(third, donor, bytes(32))
        donor.donor._guests[one.peer_id].bytes_left = SMALL - 1
        assert "enough" in await refusal_of(one, donor, digest)
        await asyncio.sleep(TIMEOUTS.transfer_s(SMALL))
        assert "busy" in await refusal_of(third, donor, digest)
        assert "busy" in await refusal_of(one, donor, digest)
        await asyncio.sleep(PAUSE_S)
        assert await ask(third, donor, digest) == payload
        assert donor.donor.num_guests == 3

    among_donors(4, scenario)


def test_one_identity_does_not_keep_the_places_of_all_donors() -> None:
    """It asks every donor first, again and again; a newcomer finds places all the same."""

    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        newcomer, greedy, *others = nodes
        for node in others:
            await node.give()
        for node in others:
            digest = await sha256(node.snapshot().payload)
            assert await ask(greedy, node, digest) == node.snapshot().payload
        found = await newcomer.newcomer.fetch(WANTED)
        assert len(found) == COUNT and names(found) <= {node.peer_id for node in others}

    among_donors(2 + 7, scenario)


def test_one_address_group_keeps_one_place() -> None:
    """Six names of one network take one place of a donor, and newcomers of three other networks get the other three."""

    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        donor, *others = nodes
        crowd, honest = others[:6], others[6:]
        groups = {node.peer_id: "192.0.2.0/24" for node in crowd} | {node.peer_id: node.peer_id for node in honest}
        donor.donor._group_of = groups.get
        await donor.give()
        payload = donor.snapshot().payload
        digest = await sha256(payload)
        assert sum([not await refusal_of(node, donor, digest) for node in crowd]) == 1
        assert [await ask(node, donor, digest) for node in honest[: PLACES - 1]] == [payload] * (PLACES - 1)
        assert "busy" in await refusal_of(honest[-1], donor, digest)

    among_donors(1 + 6 + PLACES, scenario)


def test_newcomer_takes_one_adapter_of_a_network_even_where_it_shows_only_after_the_transfer() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        newcomer, *others = nodes
        for node in others:
            await node.give()
        hostile, connected = {node.peer_id for node in others[:6]}, set[str]()
        request = newcomer.transport.request

        async def noted(peer_id: str, *arguments: Any, **options: Any) -> bytes:
            connected.add(peer_id)
            return await request(peer_id, *arguments, **options)

        newcomer.transport.request = noted  # type: ignore[method-assign]

        def network_of_connection(peer_id: str) -> str | None:
            return None if peer_id not in connected else "192.0.2.0/24" if peer_id in hostile else peer_id

        careful = Newcomer(TIMEOUTS, newcomer.context, rng=random.Random(0), network_of=network_of_connection)
        found = names(await careful.fetch(WANTED))
        assert len(found) == COUNT and len(found & hostile) <= 1

    among_donors(1 + 6 + 5, scenario)


def test_newer_adapter_waits_until_the_guest_has_all_of_the_older_one() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        donor, guest = nodes
        await donor.give()
        old, new = donor.snapshot().payload, bytes(SMALL)
        old_digest, new_digest = await sha256(old), await sha256(new)
        assert await ask(guest, donor, old_digest) == old
        await donor.give(payload=new)
        assert await ask(guest, donor, old_digest) == old
        await asyncio.sleep(TIMEOUTS.transfer_s(SMALL) + PAUSE_S)
        assert "unknown" in await refusal_of(guest, donor, old_digest)
        assert await ask(guest, donor, new_digest) == new

    among_donors(2, scenario)


def test_adapter_stays_listed_while_there_is_no_newer_one() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        newcomer, *others = nodes
        for node in others:
            await node.give()
        await asyncio.sleep(5 * RELIST_S)
        assert len(await newcomer.newcomer.fetch(WANTED)) == LEAST

    among_donors(LEAST + 1, scenario)


def test_a_donor_that_takes_an_outer_step_while_a_newcomer_reads_the_list_is_asked_again() -> None:
    async def scenario(nodes: list[Node], network: MemoryNetwork) -> None:
        newcomer, *others = nodes
        for node in others:
            await node.give()
        lists = newcomer.newcomer._lists
        widest = lists.widest

        async def widest_once(lineage: str) -> list[AdapterOffer]:
            listed = await widest(lineage)
            lists.widest = widest  # type: ignore[method-assign]
            await others[0].give(payload=bytes(SMALL), outer_round=8)
            return listed

        lists.widest = widest_once  # type: ignore[method-assign]
        found = await newcomer.newcomer.fetch(WANTED)
        assert names(found) == {node.peer_id for node in others}
        assert bytes(SMALL) in {partner.snapshot.payload for partner in found}

    among_donors(LEAST + 1, scenario)
