"""Does a swarm outlive its bootstrap peer? Every combination of network, moment, restart and size, in namespaces.

    python -m tests.e2e.outlive [--reach public,nat] [--gone before] [--restart one] [--nodes 2,3] [--minutes 30]

One cell is one small swarm: a bootstrap peer and nodes that exchange made-up groups over the real transport. When all
have exchanged, the bootstrap peer is killed and nodes are restarted; then it counts how long it takes until every node
has admitted new groups, and somebody has those of every restarted node. A cell that does not get there in time shows
the advice that `swarm status` would.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from swarm.config import SharingSection
from swarm.sharing.header_relay import HeaderRelay
from tests.e2e.namespaces import Network, missing_capability
from tests.swarm_process import ModuleProcess

Reach = Literal["public", "one-public", "nat", "light", "machine", "loopback"]
Gone = Literal["before", "during", "ever"]
Restart = Literal["one", "all"]

REACHES: tuple[Reach, ...] = ("public", "one-public", "nat", "light", "machine", "loopback")
"""All on public hosts; one there and the others behind routers; all behind routers; light nodes on public hosts; all on
one machine that listens on all its addresses; all on one machine with the default settings."""
GONES: tuple[Gone, ...] = ("before", "during", "ever")
"""The bootstrap peer is killed while the nodes that restart are down, and never returns; likewise, but it returns
RETURNS_AFTER_S after they have started; while all run, PAUSE_S before the restart, and it never returns."""
RESTARTS: tuple[Restart, ...] = ("one", "all")
SIZES = (2, 3, 6)
EXCHANGE_TIMEOUT_S = 60.0
RETURNS_AFTER_S = 30.0
PAUSE_S = 10.0
_SETTLE_TIMEOUT_S = 90.0
_PUBLISH_INTERVAL_S = 2.0
_ANSWER_TIMEOUT_S = 60.0
_LISTEN = ["/ip4/0.0.0.0/tcp/4001"]
_GOSSIP_LISTEN = ["/ip4/0.0.0.0/tcp/4002"]


@dataclass(frozen=True)
class Cell:
    """One combination."""

    reach: Reach
    gone: Gone
    restart: Restart
    num_nodes: int


@dataclass(frozen=True)
class Outcome:
    """What became of one cell."""

    seconds: float | None
    """From the restart until all have exchanged; None where they did not in time."""
    advice: list[str] = field(default_factory=list)
    """What the nodes advised then, without repetitions."""
    trouble: str = ""
    """Why the cell did not get as far as the restart."""

    def __str__(self) -> str:
        if self.trouble:
            return f"not run: {self.trouble}"
        told = "; ".join(self.advice) or "no advice"
        return f"not exchanged: {told}" if self.seconds is None else f"exchanged after {self.seconds:.0f} s"


class Member:
    """One node or bootstrap peer in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path, namespace: str | None, **network: object) -> None:
        self.folder = folder
        self.peer_id = ""
        self.addresses: tuple[str, ...] = ()
        self._namespace = namespace
        self._network = network
        self._process: ModuleProcess | None = None

    async def start(self) -> None:
        arguments = (str(self.folder), json.dumps(self._network))
        errors = self.folder.with_suffix(".log")
        self._process = await asyncio.to_thread(
            ModuleProcess, "tests.e2e.outlive", "member", *arguments, errors=errors, network_namespace=self._namespace
        )
        told = await asyncio.to_thread(self._process.answer, _ANSWER_TIMEOUT_S)
        self.peer_id, self.addresses = told["peer_id"], tuple(told["addresses"])

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.kill)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    async def state(self) -> dict[str, Any]:
        """by_author: {peer id: groups admitted}; advice: lines; neighbors, gossips_with, peers: for whoever debugs."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.ask, "state", _ANSWER_TIMEOUT_S)


@contextlib.asynccontextmanager
async def swarm_of(cell: Cell, network: Network | None, folder: Path) -> AsyncIterator[tuple[Member, list[Member]]]:
    """The bootstrap peer and the nodes of a cell, all started; killed at the end. `network` is None on loopback."""
    public: dict[str, Any] = {"listen": _LISTEN, "gossip_listen": _GOSSIP_LISTEN} if network is not None else {}
    if cell.reach == "machine":
        public = {"listen": ["/ip4/0.0.0.0/tcp/0"]}
    shared = _namespace(network)
    serves = {"serve_relay": True, "serve_gossip": True, "reachability": "public"}
    bootstrap = Member(folder / "bootstrap", shared, **serves, **public)
    nodes: list[Member] = []
    try:
        await bootstrap.start()
        is_near = cell.reach in ("machine", "loopback")
        peers = [address for address in bootstrap.addresses if is_near == ("/127.0.0.1/" in address)]
        for number in range(cell.num_nodes):
            is_home = cell.reach == "nat" or (cell.reach == "one-public" and number > 0)
            namespace = shared if is_near else _namespace(network, is_home=is_home)
            settings = {**public, "initial_peers": peers, "backend": "libp2p" if cell.reach == "light" else "hivemind"}
            nodes.append(Member(folder / f"node{number}", namespace, **settings))
            await nodes[-1].start()
        yield bootstrap, nodes
    finally:
        for member in (bootstrap, *nodes):
            await member.kill()


def _namespace(network: Network | None, *, is_home: bool = False) -> str | None:
    if network is None:
        return None
    return (network.home().host if is_home else network.public_host()).namespace


async def run_cell(
    cell: Cell, folder: Path, *, exchange_timeout_s: float = EXCHANGE_TIMEOUT_S, pause_s: float = PAUSE_S
) -> Outcome:
    """Run one cell. `folder` takes the nodes' folders and logs, `pause_s` is how long the swarm runs undisturbed."""
    with contextlib.ExitStack() as stack:
        network = None if cell.reach == "loopback" else stack.enter_context(Network())
        async with swarm_of(cell, network, folder) as (bootstrap, nodes):
            if not await _within(_SETTLE_TIMEOUT_S, lambda: _all_exchanged(nodes, [{} for _ in nodes], nodes)):
                states = [await node.state() for node in nodes]
                return Outcome(None, trouble=f"no exchange with the bootstrap peer: {states}")
            await asyncio.sleep(pause_s)  # a node remembers peers after a moment
            if cell.gone == "ever":
                await bootstrap.kill()
                await asyncio.sleep(pause_s)
            return await _lose_bootstrap(cell, bootstrap, nodes, exchange_timeout_s)


async def _lose_bootstrap(cell: Cell, bootstrap: Member, nodes: list[Member], exchange_timeout_s: float) -> Outcome:
    restarted = nodes[-1:] if cell.restart == "one" else nodes
    for node in restarted:
        await node.kill()
    await bootstrap.kill()
    before = [(await node.state())["by_author"] if node.is_running else {} for node in nodes]
    await asyncio.gather(*(node.start() for node in restarted))
    start = time.monotonic()
    returning = asyncio.create_task(_return(bootstrap)) if cell.gone == "during" else None
    try:
        timeout_s = exchange_timeout_s + (RETURNS_AFTER_S if returning is not None else 0.0)
        done = await _within(timeout_s, lambda: _all_exchanged(nodes, before, restarted))
        seconds = time.monotonic() - start
        if returning is not None:
            await returning
    finally:
        if returning is not None:
            returning.cancel()
    states = [await node.state() for node in nodes]
    if not done:
        for node, state in zip(nodes, states, strict=True):
            print(f"  {node.folder.name}: {json.dumps(state)}", file=sys.stderr)
    return Outcome(seconds if done else None, sorted({line for state in states for line in state["advice"]}))


async def _return(bootstrap: Member) -> None:
    await asyncio.sleep(RETURNS_AFTER_S)
    await bootstrap.start()


async def _all_exchanged(nodes: list[Member], before: list[dict[str, int]], restarted: list[Member]) -> bool:
    """Whether every node has admitted groups since `before`, and somebody those of every node in `restarted`."""
    states = [await node.state() for node in nodes]
    new_of: list[set[str]] = []
    for state, known in zip(states, before, strict=True):
        new_of.append({author for author, count in state["by_author"].items() if count > known.get(author, 0)})
    return all(new_of) and {node.peer_id for node in restarted} <= set[str]().union(*new_of)


async def _within(timeout_s: float, condition: Callable[[], Any]) -> bool:
    """Poll other processes, which send no event."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.5)
    return True


async def _be_member(folder: Path, settings: dict[str, Any]) -> None:
    """The process of a member: it publishes all the time, and tells its state when it is asked."""
    from tests.e2e.exchange_process import _Node
    from tests.unit.experience_factory import SWARM_ID

    settings = {"poll_interval_s": 1.0, "request_timeout_s": 20.0, **settings}
    node = _Node(folder, SWARM_ID, settings)
    node._indices = itertools.count(int(time.time()) % 500_000)  # not those that it published before a restart
    await node.transport.start()
    context = node.exchange.parts.context
    if settings.get("serve_gossip"):
        work = [HeaderRelay(SharingSection(), context).work(lambda: None)]
    else:
        work = [*node.exchange.work(lambda: None), _publish(node)]
    tasks = [asyncio.create_task(one) for one in work]
    _say(peer_id=node.transport.peer_id, addresses=node.transport.addresses())
    while await asyncio.to_thread(sys.stdin.readline):
        if failed := next((task for task in tasks if task.done()), None):
            raise RuntimeError(f"a task of the node ended: {failed!r}")
        _say(**await _state(node))


async def _publish(node: Any) -> None:
    while True:
        node.publish()
        await asyncio.sleep(_PUBLISH_INTERVAL_S)


async def _state(node: Any) -> dict[str, Any]:
    transport, parts = node.transport, node.exchange.parts
    session = getattr(transport, "_session", None)
    return {
        "by_author": {peer.peer_id: peer.groups_admitted for peer in parts.peers() if peer.groups_admitted},
        "advice": list(getattr(transport, "advice", lambda: ())()),
        "hosts_index": transport.hosts_index,
        "addresses": transport.addresses(),
        "peers": len(await transport.connected_peers()),
        "neighbors": len(session.neighbors) if session is not None else 0,
        "gossips_with": len(transport.gossip.peers()),
        "gossiped": parts.totals.num_headers_gossiped,
        "swept": parts.totals.num_headers_swept,
        "rejected": dict(parts.totals.rejected),
    }


def _say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def chosen_cells(options: Mapping[str, str | None]) -> Iterator[Cell]:
    """The cells that the options leave: each is a list with commas, or None for all."""

    def of(name: str, values: tuple[Any, ...]) -> list[Any]:
        text = options.get(name)
        return [value for value in values if text is None or str(value) in text.split(",")]

    for reach, size, gone, restart in itertools.product(
        of("reach", REACHES), of("nodes", SIZES), of("gone", GONES), of("restart", RESTARTS)
    ):
        yield Cell(reach, gone, restart, size)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.outlive", description=__doc__)
    for name, values in (("reach", REACHES), ("gone", GONES), ("restart", RESTARTS), ("nodes", SIZES)):
        parser.add_argument(f"--{name}", help=f"Of {', '.join(map(str, values))}; by default all.")
    parser.add_argument("--minutes", type=float, default=180.0, help="No cell begins after this time.")
    parser.add_argument("--at-once", type=int, default=1, help="Cells that run at the same time.")
    parser.add_argument("--folder", type=Path, help="Takes the nodes' folders and logs.")
    options = parser.parse_args()
    if (missing := missing_capability()) is not None:
        sys.exit(f"the cells need network namespaces, got: {missing}; run as root with iproute2 and iptables")
    deadline = time.monotonic() + 60 * options.minutes
    top = options.folder or Path(tempfile.mkdtemp(prefix="outlive-"))
    top.mkdir(parents=True, exist_ok=True)
    print("| network | bootstrap gone | restarts | nodes | outcome |\n|---|---|---|---|---|", flush=True)
    places = asyncio.Semaphore(options.at_once)

    async def show(cell: Cell) -> None:
        async with places:
            outcome = Outcome(None, trouble="out of time")
            if time.monotonic() < deadline:
                name = f"{cell.reach}-{cell.gone}-{cell.restart}-{cell.num_nodes}"
                outcome = await run_cell(cell, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=top)))
            print(f"| {cell.reach} | {cell.gone} | {cell.restart} | {cell.num_nodes} | {outcome} |", flush=True)

    await asyncio.gather(*map(show, chosen_cells(vars(options))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["member"]:
        import logging

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        asyncio.run(_be_member(Path(sys.argv[2]), json.loads(sys.argv[3])))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        asyncio.run(main())
