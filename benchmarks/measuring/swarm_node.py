"""One node of this project without a policy: its real transport, gossip, publisher, reader, admission and pool.

    sized groups ─→ Publisher ─→ gossip, index ─→ Reader ─→ body over a stream ─→ Admission ─→ ExperiencePool on disk

All of it wired by `swarm.sharing.exchange`, as in a node; commands come from `node_processes`. Run as a module.
"""

import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from measuring.command_loop import reply, take_over_stdout
from measuring.sized_groups import GROUPS_PER_BODY, SizedJudge, sized_groups, vocabulary
from swarm.admission.admission import Admission
from swarm.config import NetworkSection, SharingSection
from swarm.machine.memory import keep_heaps_small
from swarm.network.context import NodeContext
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.transport import TrafficCounter
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import load_or_create
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator
from swarm.sharing.parts import NoObserver, make_sharing_parts
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.totals import SharingPause
from swarm.types import RolloutGroup

SWARM_ID = "5e" * 16
_BARE = "/swarm-benchmark/bare/1"
_LEFTOVERS_TIMEOUT_S = 25.0


class WatchedTransport(HivemindTransport):
    """Adds up how long its calls took."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.calls: dict[str, list[float]] = {}
        """Seconds of each call, by name."""

    async def store(self, *args: Any, **named: Any) -> bool:
        with self._timed("store"):
            return await super().store(*args, **named)

    async def load(self, *args: Any, **named: Any) -> dict[str, bytes]:
        with self._timed("load"):
            return await super().load(*args, **named)

    async def request(self, *args: Any, **named: Any) -> bytes:
        with self._timed("request"):
            return await super().request(*args, **named)

    async def publish(self, *args: Any, **named: Any) -> None:
        with self._timed("gossip"):
            await super().publish(*args, **named)

    @contextlib.contextmanager
    def _timed(self, name: str):
        start = time.monotonic()
        try:
            yield
        finally:
            self.calls.setdefault(name, []).append(time.monotonic() - start)


class WatchedPool(ExperiencePool):
    """Tells when each body of a round came in, and claims a stock, so that the reader wants a certain number of bodies."""

    def __init__(self, path: Path, config: SharingSection, clock: Callable[[], float]) -> None:
        super().__init__(path, config, clock)
        self.round = -1
        self.arrivals: list[float] = []
        """Monotonic time at which each body of this round was in the pool."""
        self.stock_groups = 0
        self._changed = asyncio.Event()

    def add(
        self, body_hash: bytes, expires_at: float, created_at: float, groups: Sequence[RolloutGroup], *rest: Any
    ) -> int:
        added = super().add(body_hash, expires_at, created_at, groups, *rest)
        if added and groups[0].policy_version == self.round:
            self.arrivals.append(time.monotonic())
            self._changed.set()
        return added

    def num_fresh(self) -> int:
        return super().num_fresh() + self.stock_groups

    async def wait_for(self, num_bodies: int, timeout_s: float) -> None:
        """Until so many bodies of this round are here, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.arrivals) < num_bodies:
                    self._changed.clear()
                    await self._changed.wait()


class ExchangeNode:
    """Wired as `swarm.node.node.Node` wires it, less the policy."""

    def __init__(self, folder: Path, num_nodes: int, settings: dict[str, Any]) -> None:
        self._num_others = num_nodes - 1
        self._identity = load_or_create(folder / "identity.key")
        self._rng = random.Random(self._identity.peer_id)
        # A batch wants one group of every other node; with its read-ahead of three batches that is every body.
        sharing = SharingSection(swarm_groups=self._num_others)
        network = NetworkSection.model_validate(settings)
        self.transport = WatchedTransport(network, self._identity, folder, EntryValidator(SWARM_ID))
        context = NodeContext.of(self._identity, SWARM_ID, self.transport)
        self._pool = WatchedPool(folder / "pool.sqlite", sharing, context.clock)
        tracker = PeerTracker(sharing, context, max_shown=0)
        parts = make_sharing_parts(sharing, context, tracker, pause=SharingPause(), observer=NoObserver())
        admission = Admission(sharing, context, verifier=SizedJudge(), vocabulary=vocabulary())
        self._exchange = Exchange(sharing, network, parts, admission=admission, pool=self._pool, rng=self._rng)
        self._groups: list[RolloutGroup] = []
        self._num_wanted = 0
        self._traffic_before = TrafficCounter()
        self._work: list[asyncio.Task[None]] = []
        self._publishing: asyncio.Task[None] | None = None
        self.num_failed_steps = 0
        self._bare_body: bytes | None = None
        """Set in a round in which nothing is announced, checked or stored: what the requests alone take."""
        self.transport.serve(_BARE, self._hand_out, max_request_bytes=1)

    async def _hand_out(self, peer_id: str, request: bytes) -> bytes:
        return self._bare_body or b""

    async def start(self) -> dict[str, Any]:
        await self.transport.start()
        self._work = [asyncio.create_task(work) for work in self._exchange.work(self._count_failed_step)]
        return {"addresses": self.transport.addresses()}

    async def stop(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self.transport.stop()
        self._pool.close()

    async def prepare(self, *, number: int, body_bytes: int, num_bodies: int, bare: bool, **_: Any) -> dict[str, Any]:
        """Make the batch to publish, and want `num_bodies` of others, once they are announced."""
        self._bare_body = self._rng.randbytes(body_bytes) if bare else None
        self._groups = sized_groups(self._identity.peer_id, number, body_bytes, self._rng)
        self._num_wanted = num_bodies
        self._pool.round, self._pool.arrivals = number, []
        self._pool.stock_groups = GROUPS_PER_BODY * (self._num_others - num_bodies)
        return {}

    async def go(self, *, start_at: float, time_limit_s: float) -> dict[str, Any]:
        """Publish at that moment; the reply comes when the bodies are here, or too late."""
        await asyncio.sleep(start_at - time.monotonic())
        self.transport.calls.clear()
        self._traffic_before = replace(self.transport.traffic)
        if self._bare_body is not None:
            return await self._go_bare(start_at, time_limit_s)
        self._publishing = asyncio.create_task(self._exchange.publisher.publish(self._groups))
        await self._pool.wait_for(self._num_wanted, time_limit_s)
        arrivals = self._pool.arrivals
        is_complete = len(arrivals) >= self._num_wanted
        return {
            "seconds": arrivals[self._num_wanted - 1] - start_at if is_complete else None,
            "first_s": arrivals[0] - start_at if arrivals else None,
        }

    async def _go_bare(self, start_at: float, time_limit_s: float) -> dict[str, Any]:
        limits: dict[str, Any] = {"max_response_bytes": len(self._bare_body or b""), "deadline_s": time_limit_s}
        peers = self._rng.sample(await self.transport.connected_peers(), self._num_wanted)
        await asyncio.gather(*(self.transport.request(peer, _BARE, b"", **limits) for peer in peers))
        return {"seconds": time.monotonic() - start_at, "first_s": None}

    async def finish(self) -> dict[str, Any]:
        """Wait until the own batch is in the index too, and tell what the round took."""
        if self._publishing is not None:
            await self._publishing
            await self._exchange.publisher.entered()
        traffic, before = replace(self.transport.traffic), self._traffic_before
        return {
            "calls": {name: (len(times), sum(times), max(times)) for name, times in self.transport.calls.items()},
            "bytes_sent": traffic.bytes_sent - before.bytes_sent,
            "bytes_received": traffic.bytes_received - before.bytes_received,
        }

    async def clear(self) -> dict[str, Any]:
        """The round is over for all: pull what is left and empty the pool for the next one."""
        has_announced = self._publishing is not None
        self._groups, self._publishing = [], None  # a node has learned from them by now
        self._pool.stock_groups = 0
        if has_announced:
            await self._pool.wait_for(self._num_others, _LEFTOVERS_TIMEOUT_S)
        num_drawn = 0
        while drawn := len(self._pool.draw(GROUPS_PER_BODY, self._rng)):  # few at a time, as training does
            num_drawn += drawn
        return {
            "leftover_groups": num_drawn - GROUPS_PER_BODY * self._num_wanted * has_announced,
            "rejected": dict(self._exchange.parts.totals.rejected),
            "failed_steps": self.num_failed_steps,
        }

    def _count_failed_step(self) -> None:
        self.num_failed_steps += 1


async def _commands() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def _serve(replies: TextIO) -> None:
    node: ExchangeNode | None = None
    try:
        async for command in _commands():
            name = command.pop("do")
            if name == "start":
                settings = {"initial_peers": command["initial_peers"], **command["network"]}
                node = ExchangeNode(Path(command["folder"]), command["num_nodes"], settings)
                reply(replies, await node.start())
            else:
                assert node is not None, "start comes first"
                step = {"prepare": node.prepare, "go": node.go, "finish": node.finish, "clear": node.clear}[name]
                reply(replies, await step(**command))
    finally:
        if node is not None:
            await node.stop()


if __name__ == "__main__":
    keep_heaps_small()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(take_over_stdout()))
