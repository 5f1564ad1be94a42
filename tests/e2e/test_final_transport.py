"""The exchanges of a final merge over libp2p on loopback, with the daemon and without."""

import asyncio
import contextlib
import hashlib
import random
import time
from pathlib import Path
from typing import Any, Self

import pytest

from swarm.merging.exchange.final_meeting import FinalMeeting
from swarm.merging.final_merge import meetings_of
from swarm.network.context import NodeContext
from swarm.records.identity import load_or_create
from swarm.types import Appointment, Seats, Snapshot
from tests.e2e.merge_process import MergeNode
from tests.e2e.test_merge_transport import NUM_BYTES, QUIET
from tests.unit.experience_factory import LINEAGE, SWARM_ID

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
AHEAD_S = 12.0


def interval_with_a_boundary_ahead() -> float:
    """About AHEAD_S: this moment is a multiple of it, so the next one is so far away."""
    now = time.time()
    return now / (now // AHEAD_S)


class FinalNode(MergeNode):
    def __init__(self, folder: Path, network: dict[str, Any], interval_s: float) -> None:
        super().__init__(folder, NUM_BYTES, network)
        self.meeting = FinalMeeting(
            NodeContext.of(load_or_create(folder / "identity.key"), SWARM_ID, self.transport), random.Random(self.peer_id),
            interval_s=interval_s, window_s=20.0, request_timeout_s=5.0,
        )  # fmt: skip
        self.seats: Seats | None = None
        self._meeting_work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._meeting_work = asyncio.create_task(self.meeting.work())
        await asyncio.sleep(0)  # it begins
        return self

    async def __aexit__(self, *details: object) -> None:
        assert self._meeting_work is not None
        self._meeting_work.cancel()
        await asyncio.gather(self._meeting_work, return_exceptions=True)
        await super().__aexit__(*details)

    async def merge(self) -> list[tuple[str, bytes]]:
        """(peer, SHA-256 of its adapter) of all that came."""
        snapshot, came = Snapshot(LINEAGE.policy, "bf16", 0, 0, self.payload), list[tuple[str, bytes]]()
        seats = self.seats = await asyncio.wrap_future(self.meeting.gather(snapshot))
        for meeting in meetings_of(seats.own_place, len(seats.peer_ids)):
            peer_id = seats.peer_ids[meeting.place]
            appointment = Appointment(meeting.window, peer_id, meeting.gives, meeting.takes, 1, snapshot)
            met = await asyncio.wrap_future(self.meeting.meet(appointment))
            assert (met.partner is not None) == meeting.takes, met.reason
            if met.partner is not None:
                came.append((peer_id, hashlib.sha256(met.partner.snapshot.payload).digest()))
        return came


async def test_three_nodes_meet_at_a_boundary_and_have_each_other_s_adapters(tmp_path: Path) -> None:
    interval_s = interval_with_a_boundary_ahead()
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(FinalNode(tmp_path / "0", QUIET, interval_s))
        joined = QUIET | {"initial_peers": first.transport.addresses()}
        nodes = [first]
        for number, more in enumerate(({}, {"backend": "libp2p"}), 1):
            node = FinalNode(tmp_path / str(number), joined | more, interval_s)
            nodes.append(await stack.enter_async_context(node))
        came = await asyncio.gather(*(node.merge() for node in nodes))
    assert first.seats is not None
    adapters = {node.peer_id: hashlib.sha256(node.payload).digest() for node in nodes}
    by_place = [len(came[[node.peer_id for node in nodes].index(peer_id)]) for peer_id in first.seats.peer_ids]
    assert by_place == [2, 1, 1]  # the passenger and one of the core; one of the core; the result
    assert all(adapters[peer_id] == digest for of_one in came for peer_id, digest in of_one)
