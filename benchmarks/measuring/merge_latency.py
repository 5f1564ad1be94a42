"""Real nodes that merge: libp2p daemon, streams and index on loopback, `MergeExchange` and `Merger` as a node has them.

    compute thread of each node: Merger.after (offer) ─ "trains" ─ Merger.after every 20 ms, until there is an outer step

What training waits for is the time inside `Merger.after`; everything else happens on the network loop meanwhile.
"""

import asyncio
import contextlib
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.config import MergingSection, NetworkSection
from swarm.merging.exchange.merge_exchange import MergeExchange
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.merging.merger import Merger, MergeSchedule
from swarm.merging.outer_optimizer import AdapterOrigin
from swarm.network.context import NodeContext
from swarm.network.make_transport import make_transport
from swarm.records.identity import load_or_create
from swarm.sharing.index import EntryValidator

SWARM_ID = "0" * 32
LINEAGE = "1" * 32
_POLL_INTERVAL_S = 0.02
_NETWORK = {"gossip": "off", "reachability": "public"}


@dataclass(frozen=True, slots=True)
class Sync:
    """One outer step of all nodes."""

    num_nodes: int
    sync_s: float
    """From a node's offer to its outer step, mean over nodes."""
    slowest_s: float
    blocking_s: float
    """Of it inside `Merger.after`, where training waits: encoding, decoding, clipping, the step. Mean over nodes."""
    blocking_cpu_s: float
    """Processor time of that: nodes in one process wait for each other's Python, which nodes of their own do not."""
    merged_share: float
    """Nodes that had a partner."""


class _Node:
    def __init__(self, folder: Path, config: MergingSection, start: dict[str, torch.Tensor], peers: list[str]) -> None:
        folder.mkdir()
        identity = load_or_create(folder / "identity.key")
        network = NetworkSection.model_validate({**_NETWORK, "initial_peers": peers})
        transport = make_transport(network, identity, folder, EntryValidator(SWARM_ID))
        assert transport is not None
        self.transport = transport
        timeouts = MergeTimeouts(config.search_timeout_s, config.request_timeout_s, config.min_bytes_per_s)
        context = NodeContext.of(identity, SWARM_ID, transport)
        self._exchange = MergeExchange(timeouts, context, rng=random.Random(identity.peer_id))
        origin = AdapterOrigin(LINEAGE, 2.0, start)
        self._merger = Merger(config, origin, MergeSchedule(config, 0), pairer=self._exchange)
        generator = torch.Generator().manual_seed(sum(identity.peer_id.encode()))
        self._fast = {name: t + 1e-3 * torch.randn(t.shape, generator=generator) for name, t in start.items()}
        self._work: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.transport.start()
        self._work = asyncio.create_task(self._exchange.work())
        await asyncio.sleep(0)

    async def stop(self) -> None:
        if self._work is not None:
            self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
        await self.transport.stop()

    def sync(self, patience_s: float) -> tuple[float, float, float, bool]:
        """Seconds until the outer step, of them inside `after`, processor time of those, whether there was a partner.

        On a thread of its own.
        """
        began, inside, inside_cpu, pause = time.monotonic(), 0.0, 0.0, threading.Event()
        num_steps = 1
        while time.monotonic() - began < patience_s:
            called, called_cpu = time.monotonic(), time.thread_time()
            step = self._merger.after(num_steps, lambda: self._fast, 1)
            inside += time.monotonic() - called
            inside_cpu += time.thread_time() - called_cpu
            if step is not None:
                return time.monotonic() - began, inside, inside_cpu, step.partner is not None
            num_steps = 0
            pause.wait(_POLL_INTERVAL_S)
        raise RuntimeError(f"an exchange must end within {patience_s:g} s, got none")


def measure_syncs(num_nodes: int, num_syncs: int, rank: int, search_s: float) -> list[Sync]:
    """`num_nodes` in this process, each with a daemon; q and v of a 0.5B model in bf16 (2.2 MB at rank 16)."""
    return asyncio.run(_measure(num_nodes, num_syncs, rank, search_s))


async def _measure(num_nodes: int, num_syncs: int, rank: int, search_s: float) -> list[Sync]:
    config = MergingSection(inner_steps=1, search_timeout_s=search_s)
    start = made_up_adapter(rank)
    nodes: list[_Node] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(num_nodes):
                peers = list(nodes[0].transport.addresses()) if nodes else []
                nodes.append(_Node(Path(folder) / str(number), config, start, peers))
                await nodes[-1].start()
            return [await _sync_all(nodes, config) for _ in range(num_syncs)]
        finally:
            for node in reversed(nodes):
                await node.stop()


async def _sync_all(nodes: list[_Node], config: MergingSection) -> Sync:
    limit_s, loop = config.search_timeout_s + 60.0, asyncio.get_running_loop()
    # not the loop's own threads: they are few, and transports hash on them
    with ThreadPoolExecutor(len(nodes)) as threads:
        done = await asyncio.gather(*(loop.run_in_executor(threads, node.sync, limit_s) for node in nodes))
    times, inside, inside_cpu, has_partner = zip(*done, strict=True)
    return Sync(
        num_nodes=len(nodes),
        sync_s=statistics.fmean(times),
        slowest_s=max(times),
        blocking_s=statistics.fmean(inside),
        blocking_cpu_s=statistics.fmean(inside_cpu),
        merged_share=statistics.fmean(has_partner),
    )


def made_up_adapter(rank: int) -> dict[str, torch.Tensor]:
    """Factors for q and v of 24 layers of width 896, v with 128 outputs: the shapes of Qwen2.5-0.5B."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": 896, "v_proj": 128}
    return {
        f"model.layers.{layer}.self_attn.{name}.{factor}": 0.03 * torch.randn(size, generator=generator)
        for layer in range(24)
        for name, outputs in shapes.items()
        for factor, size in (("lora_A", (rank, 896)), ("lora_B", (outputs, rank)))
    }
