"""Fetches adapters for a node that joins a lineage late, from several donors drawn at random.

    list of donors ─ random sample ─ right lineage, precision, length; one per identity, network and content
                   ─ fetch until there are `count` ─ drop those far from the median round ─→ robust mean of all, elsewhere

At most one adapter comes from each address group, also where the group becomes known only when the donor is connected.

Replicas differ, so there is no hash that donors could agree on, and no single adapter can be trusted. The guarantee is: as long
as fewer than half of the adapters are false, their robust mean lies near the true ones. An attacker with more than half of the
list gets more than half of the draws, and then nothing is guaranteed.
"""

import asyncio
import random
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from swarm.errors import RequestError
from swarm.merging.exchange.adapter_donor import STARTER_PROTOCOL
from swarm.merging.exchange.proposal import MAX_LAG_ROUNDS
from swarm.merging.exchange.ready_list import ReadyList
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.network.context import NodeContext
from swarm.network.requests.transfer import Download, fetch
from swarm.records.adapter_offer import AdapterOffer
from swarm.types import Partner

COUNT = 5
"""Adapters that a newcomer wants; two of them may be false."""
LEAST = 3
"""Fewest adapters that are used: of two, nobody knows which one is false."""
_TRIES_PER_ADAPTER = 3
"""Donors asked for each adapter that is wanted: some are busy, and silent donors must not delay a newcomer for long."""

_READINGS = 2
"""How often the list is read: a donor that takes an outer step in between no longer has the adapter that it listed."""

NetworkOf = Callable[[str], str | None]
"""Peer id -> the network it is in, such as the first three bytes of its address; None where that is not known."""


@dataclass(frozen=True, slots=True)
class WantedAdapter:
    """The kind of adapter that a newcomer can use."""

    lineage: str
    precision: str
    num_bytes: int


class Newcomer:
    """A node that has just joined. It runs on the node's loop, once, before the first offer."""

    def __init__(
        self,
        timeouts: MergeTimeouts,
        context: NodeContext,
        *,
        rng: random.Random,
        network_of: NetworkOf = lambda peer_id: None,
    ) -> None:
        self._timeouts = timeouts
        self._transport = context.transport
        self._rng = rng
        self._network_of = network_of
        self._lists = ReadyList(context, rng, kind="donors")
        self.listed: list[AdapterOffer] = []
        """The donors that the last reading of the list found, of whatever precision."""

    async def fetch(self, wanted: WantedAdapter, count: int = COUNT) -> list[Partner]:
        """Fetch up to `count` adapters of different donors, one after the other; none where fewer than LEAST came.

        All of them are held in memory, one of them twice for a moment.
        """
        found: list[Partner] = []
        await self.gather(wanted, found, count)
        return of_one_time(found)

    async def gather(self, wanted: WantedAdapter, found: list[Partner], count: int = COUNT, least: int = LEAST) -> None:
        """Add adapters of further donors to `found`, up to `count` altogether. It gives up where `least` cannot be reached."""
        tries = _TRIES_PER_ADAPTER * count
        for _ in range(_READINGS):
            donors = await self._donors(wanted, {one.peer_id for one in found})
            if len(found) + len(donors) < least:
                break
            for donor in donors[:tries]:
                if len(found) == count:
                    break
                tries -= 1
                payload = None if self._is_represented(donor.peer_id, found) else await self._fetch_from(donor)
                if payload is not None and not self._is_represented(donor.peer_id, found):
                    found.append(donor.partner(payload))
            if len(found) >= least:
                break

    async def _donors(self, wanted: WantedAdapter, known: Collection[str]) -> list[AdapterOffer]:
        """The listed donors of such an adapter, without those in `known`, in random order."""
        self.listed = await self._lists.widest(wanted.lineage)
        fitting = [one for one in self.listed if (one.precision, one.num_bytes) == (wanted.precision, wanted.num_bytes)]
        return self._different(one for one in fitting if one.peer_id not in known)

    def _is_represented(self, peer_id: str, found: Iterable[Partner]) -> bool:
        """Whether there is an adapter of this network already.

        It is checked again after the transfer, when the network is known.
        """
        network = self._network_of(peer_id)
        return network is not None and any(self._network_of(one.peer_id) == network for one in found)

    def _different(self, donors: Iterable[AdapterOffer]) -> list[AdapterOffer]:
        """One donor of each content and of each known network: copies are no further evidence."""
        chosen, seen = [], set[bytes | str]()
        for donor in donors:
            network = self._network_of(donor.peer_id)
            marks = {donor.sha256} | ({network} if network is not None else set())
            if not marks & seen:
                chosen.append(donor)
                seen |= marks
        return chosen

    async def _fetch_from(self, donor: AdapterOffer) -> bytes | None:
        wanted = Download(
            donor.sha256, donor.num_bytes, STARTER_PROTOCOL, base_timeout_s=self._timeouts.request_timeout_s
        )
        try:
            async with asyncio.timeout(self._timeouts.transfer_s(donor.num_bytes)):
                return await fetch(self._transport, [donor.peer_id], wanted, self._rng)
        except (RequestError, TimeoutError):
            return None


def of_one_time(found: list[Partner], least: int = LEAST) -> list[Partner]:
    """The adapters within MAX_LAG_ROUNDS of the median round; none if these are fewer than `least`."""
    if not found:
        return []
    median = statistics.median_low(partner.snapshot.outer_round for partner in found)
    near = [partner for partner in found if abs(partner.snapshot.outer_round - median) <= MAX_LAG_ROUNDS]
    return near if len(near) >= least else []
