"""A page with a plausible life behind it, served as a node serves it."""

import asyncio
import contextlib
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from swarm.config import Config, NodeSection, ObservabilitySection
from swarm.dashboard.node_page import NodePage
from swarm.dashboard.overview import Overview
from swarm.node.controls import NodeControls
from swarm.observability.http_server import HttpServer
from swarm.observability.metrics import Metrics
from swarm.records.identity import peer_name
from swarm.sharing.totals import SharingPause
from tests.unit.experience_factory import group

REASONS = {"replay": 812, "stale": 96, "no_signal": 431, "reward_mismatch": 3, "unavailable": 17, "tokens": 1}


def round_row(number: int, rng: random.Random, **more: Any) -> dict[str, Any]:
    """A row as a node writes it, of a run that learns."""
    learned = 1 - math.exp(-number / 2500)
    return {
        "kind": "round", "time_s": time.time() - 2.0 * (10_000 - number), "round": number, "policy_version": number,
        "rollout/reward_mean": min(1.0, max(0.0, 0.22 + 0.5 * learned + rng.gauss(0, 0.05))),
        "rollout/tokens": 900, "rollout/tokens_per_s": 640 + rng.gauss(0, 40), "time/rollout_s": 1.2, "time/round_s": 2.1,
        "train/entropy": 1.5 - 0.9 * learned + rng.gauss(0, 0.04), "train/staleness_mean": abs(rng.gauss(0.8, 0.4)),
        "rollout/reward_by_source": {"sums": 0.4, "spelling": 0.3}, "reward/correct": 0.35, "reward/format": 0.9,
        "train/loss": rng.gauss(0, 0.1), "train/grad_norm": 1.0 + rng.random(), "train/clip_fraction": 0.01,
        "train/kl": 0.02 * learned if number % 3 else None,
        "train/own_groups": 8, "train/swarm_groups": 8, "train/own_groups_total": 7 * number,
        "train/swarm_groups_total": 6 * number, "pool/groups": 39, "network/peers": 12,
        "exchange/records_published": number, "exchange/records_admitted": 5 * number,
        "exchange/groups_admitted": 6 * number, "exchange/rounds_not_published": 0,
        "exchange/bytes_sent": 9000 * number, "exchange/bytes_received": 41000 * number,
        "exchange/rejected": REASONS, "health/warnings": [], **more,
    }  # fmt: skip


def merge_entries(number: int, partner: str, merges: int) -> dict[str, Any]:
    return {
        "merge/outer_steps": merges + 4, "merge/merges_total": merges, "merge/solo_steps_total": 4, "merge/in_flight": 0,
        "merge/reasons": {"merged": merges, "nobody": 3, "gate": 1}, "merge/partner": partner,
        "merge/partner_share": 0.5, "merge/clipped_share": 0.02, "merge/drift": 0.3, "merge/lag_steps": number % 2,
        "merge/last_step_s": 0.41,
    }  # fmt: skip


def peer(number: int, now_s: float) -> dict[str, Any]:
    peer_id = f"12D3KooWPeer{number:08d}"
    rng = random.Random(number)
    return {
        "peer_id": peer_id, "name": peer_name(peer_id), "lineage": f"{rng.getrandbits(128):032x}" if number % 3 else "ab" * 16,
        "weight": rng.uniform(0.2, 0.98), "banned_until": now_s + 500 if number % 41 == 40 else 0.0,
        "groups_admitted": rng.randrange(900), "records_rejected": rng.randrange(9), "last_seen_at": now_s - rng.uniform(1, 300),
        "reward_mean": rng.uniform(0.1, 0.9), "policy_version": rng.randrange(5000),
    }  # fmt: skip


def status(num_peers: int, row: dict[str, Any], **more: Any) -> dict[str, Any]:
    now_s = time.time()
    return {
        "peer_id": "12D3KooWJ1vCyzKgZ1dMdnJvKQmkmSgV6uNpA1oGm9YyZ9oB2aXc", "peer_name": "brave-otter-3f",
        "started_at": now_s - 5400, "phase": "learning", "round": row.get("round", 0),
        "policy_version": row.get("policy_version", 0), "last_round": row,
        "peers": [peer(number, now_s) for number in range(num_peers)], **more,
    }  # fmt: skip


class ServedPage:
    """A NodePage behind the node's own server, in a thread with a loop of its own."""

    def __init__(self, folder: Path, port: int = 0, max_rounds: int | None = None) -> None:
        self.folder = folder
        self.controls = NodeControls(SharingPause())
        self.page = NodePage(Config(node=NodeSection(max_rounds=max_rounds)), folder, self.controls)
        self._port = port
        self.url = ""
        self._ready = threading.Event()
        self._done = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._serve(),), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._done.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def show(self, row: dict[str, Any], told: dict[str, Any] | None = None) -> None:
        """A round, as a node's compute thread tells it, and what its status file says."""
        self.page.show_row(row)
        if told is not None:
            self.loop.call_soon_threadsafe(self.page.show_status, told)

    async def _serve(self) -> None:
        async with served(self.page, self._port) as self.url:
            self._ready.set()
            await self._done.wait()


@contextlib.asynccontextmanager
async def served(page: NodePage, port: int = 0) -> AsyncIterator[str]:
    """Its address, with a slash at the end."""
    server = HttpServer(ObservabilitySection(http_port=port), Metrics(), lambda: {"round": 7}, page.routes())
    await server.start()
    await page.start()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        await page.stop()
        await server.stop()


@contextlib.contextmanager
def serving(folder: Path, port: int = 0, max_rounds: int | None = None) -> Iterator[ServedPage]:
    one = ServedPage(folder, port, max_rounds)
    one.start()
    try:
        yield one
    finally:
        one.stop()


@contextlib.contextmanager
def serving_overview(folder: Path) -> Iterator[str]:
    """The address of an overview of a folder, which runs in a thread with a loop of its own."""
    started, urls = threading.Event(), list[str]()
    loop, done = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        overview = Overview([folder], ObservabilitySection())
        await overview.start()
        urls.append(f"http://127.0.0.1:{overview.port}/")
        started.set()
        await done.wait()
        await overview.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(20)
        assert not thread.is_alive()


def some_rollouts(page: NodePage) -> None:
    """Groups of every kind."""
    page.rollouts.explain(lambda ref: f"State the sum of 1{ref.index} and 7. Answer with the number alone.")
    page.rollouts.own([group("25", "24", " 25", "2 5", index=number) for number in range(6)])
    page.rollouts.admitted([group("right", "wrong", "right", index=number) for number in range(6, 12)])
