"""One transport in a process of its own, to be run inside a network namespace and told what to do over stdin.

    python -m tests.e2e.namespaced_node FOLDER SETTINGS_JSON
    ← {"peer_id", "addresses"}                      once, when it has started
    → {"call": "request", ...} ← {"result"} or {"error"}    one line of JSON each

Serves a body as large as an adapter and the groups that it has published, both as blobs; takes what is gossiped.
"""

import asyncio
import hashlib
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swarm.config import NetworkSection
from swarm.errors import NetworkError
from swarm.network.context import NodeContext
from swarm.network.hivemind.daemon import granted_bytes
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.requests.blob_protocol import BLOB_REQUEST_BYTES, serve_blobs
from swarm.network.requests.transfer import Download, fetch
from swarm.network.transport import ValidationResult
from swarm.records.identity import Identity, create
from swarm.sharing.directory import Directory
from swarm.sharing.index import WINDOW_S, EntryValidator, Shard, experience_key, experience_topic, shard_of, subkey
from swarm.sharing.totals import SharingTotals
from tests.e2e.namespaces import Host
from tests.swarm_process import ModuleProcess
from tests.unit.experience_factory import SWARM_ID, Clock, admission, body_and_header, context_of, group, signed

ANSWER_TIMEOUT_S = 200.0
BODY_BYTES = 16 << 20
BODY_PROTOCOL = "test/body"
_REQUEST_TIMEOUT_S = 20.0
_WINDOWS_READ = 8
_BODIES: dict[bytes, bytes] = {}
"""What this process serves, by SHA-256."""
_HEARD: list[bytes] = []
"""Records that came by gossip."""


def body_of(peer_id: str) -> bytes:
    """As large as an adapter, and another one for each node."""
    return random.Random(peer_id).randbytes(BODY_BYTES)


class NamespacedNode:
    """The process, as a test sees it: started at once, ended by the context manager."""

    def __init__(self, host: Host, folder: Path, **settings: object) -> None:
        folder.mkdir(parents=True)
        self.log = folder / "stderr.log"
        self._process = ModuleProcess(
            __name__, str(folder), json.dumps(settings), errors=self.log, network_namespace=host.namespace
        )

    def __enter__(self) -> Self:
        started = self._read()
        self.peer_id: str = started["peer_id"]
        self.addresses: list[str] = started["addresses"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._process.stop(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def call(self, name: str, **arguments: object) -> Any:
        """Have the node do something and return its result. Raises RuntimeError with the node's error."""
        self._process.tell(json.dumps({"call": name, **arguments}))
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        try:
            return self._process.answer(ANSWER_TIMEOUT_S)
        except EOFError:
            raise RuntimeError(f"the node has ended: {self.log.read_text()[-2000:]}") from None


async def _serve(folder: Path, settings: dict[str, Any]) -> None:
    identity = create(folder / "identity.key")
    node = HivemindTransport(
        NetworkSection.model_validate(settings), identity, folder, EntryValidator(SWARM_ID), health_interval_s=1.0
    )
    body = body_of(node.peer_id)
    _BODIES[hashlib.sha256(body).digest()] = body
    node.serve(BODY_PROTOCOL, serve_blobs(_BODIES.get), max_request_bytes=BLOB_REQUEST_BYTES)
    node.subscribe(experience_topic(SWARM_ID, shard_of(SWARM_ID, node.peer_id, 0, 0.0)), _hear)
    worker = _Worker(
        node, identity, Directory(NodeContext.of(identity, SWARM_ID, node), SharingTotals(node.now, reads=False))
    )
    await node.start()
    try:
        _say(peer_id=node.peer_id, addresses=node.addresses())
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            call = json.loads(line)
            try:
                _say(result=await getattr(worker, call.pop("call"))(**call))
            except Exception as error:  # the test sees it
                _say(error=f"{type(error).__name__}: {error}")
    finally:
        await node.stop()


def _say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def _hear(forwarder: str, record: bytes) -> ValidationResult:
    _HEARD.append(record)
    return ValidationResult.ACCEPT


class _Worker:
    """What the node does when it is told to; arguments and results travel as JSON."""

    def __init__(self, node: HivemindTransport, identity: Identity, directory: Directory) -> None:
        self._node = node
        self._identity = identity
        self._directory = directory

    async def state(self) -> dict[str, Any]:
        """Where it is, whom it is connected to and how, whom it remembers, and what of the index it hosts."""
        down = {"is_full": None, "addresses": [], "peers": {}, "neighbors": [], "remembered": {}, "num_keys": 0}
        session = self._node._session
        if session is None:
            return down
        try:
            peers = await session.peers()
        except NetworkError:  # the daemon is being exchanged for one of another role
            return down
        return {
            "is_full": session._role.is_full,
            "addresses": self._node.addresses(),
            "peers": peers,
            "neighbors": sorted(session.neighbors),
            "remembered": self._node._peers.stored(),
            "num_keys": len(session._node.protocol.storage),
        }

    async def granted_bytes(self) -> int | None:
        """How much it lets through a circuit, as it tells another daemon."""
        session = self._node._session
        assert session is not None
        own, addresses = await session.control.identity()
        return await granted_bytes(session._daemon.binary, session._folder.path, own, addresses)

    async def hang_up(self, peer_id: str) -> None:
        """Close the connection to a peer; the next request opens another."""
        session = self._node._session
        assert session is not None
        await session.control.disconnect(peer_id)

    async def meet_others(self) -> list[str]:
        """List itself, meet those that are listed; the peers that its gossip is connected to."""
        await self._directory.turn()
        return sorted(self._node.gossip.peers())

    async def publish(self, index: int) -> bool:
        """Sign a header of one group of rollouts, put it into the index and serve the body."""
        record, expires_at = self._signed_group(index)
        key = experience_key(SWARM_ID, self._shard, self._node.now())
        return await self._node.store(key, subkey(self._node.peer_id, index), record, expires_at)

    async def gossip(self, index: int) -> None:
        """The same without the index."""
        record, _ = self._signed_group(index)
        await self._node.publish(experience_topic(SWARM_ID, self._shard), record)

    async def admit(self) -> dict[str, list[int]]:
        """Take what others have put into the index: {author: indices of the groups admitted}."""
        now = self._node.now()
        keys = [experience_key(SWARM_ID, self._shard, now - back * WINDOW_S) for back in range(_WINDOWS_READ)]
        found = await asyncio.gather(*map(self._node.load, keys))
        entries = [item for entries in found for item in entries.items()]
        return await self._admitted([record for sub, record in entries if self._node.peer_id not in sub])

    async def admit_gossiped(self) -> dict[str, list[int]]:
        """Take what was gossiped, in the same way."""
        return await self._admitted(_HEARD)

    async def fetch(self, peer_id: str) -> dict[str, Any]:
        """The large body of a peer; whether it is right, and how long it took."""
        start, expected = self._node.now(), body_of(peer_id)
        body = await self._fetched(peer_id, hashlib.sha256(expected).digest(), BODY_BYTES)
        return {"is_right": body == expected, "seconds": self._node.now() - start}

    @property
    def _shard(self) -> Shard:
        """One for all: a swarm of this size has a single shard, and the epoch does not matter here."""
        return shard_of(SWARM_ID, self._node.peer_id, 0, 0.0)

    def _signed_group(self, index: int) -> tuple[bytes, float]:
        """(record, when it expires)"""
        body, header = body_and_header(group(index=index, author=self._identity.peer_id))
        expires_at = self._node.now() + 300
        changes = {"author": self._identity.peer_id, "created_at": self._node.now(), "expires_at": expires_at}
        header = replace(header, sequence=index, **changes)
        _BODIES[header.body_hash] = body
        return signed(header, self._identity), expires_at

    async def _admitted(self, records: list[bytes]) -> dict[str, list[int]]:
        """Through the real door, bodies from their authors."""
        door = admission(context_of(clock=Clock(self._node.now())))
        admitted: dict[str, list[int]] = {}
        for record in records:
            header = door.admit_header(record)
            body = await self._fetched(header.author, header.body_hash, header.body_bytes)
            admitted.setdefault(header.author, []).extend(one.task.index for one in door.admit_body(header, body))
        return admitted

    async def _fetched(self, peer_id: str, digest: bytes, num_bytes: int) -> bytes:
        download = Download(digest, num_bytes, BODY_PROTOCOL, base_timeout_s=_REQUEST_TIMEOUT_S)
        return await fetch(self._node, [peer_id], download, random.Random(0))


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO)
    asyncio.run(_serve(Path(sys.argv[1]), json.loads(sys.argv[2])))
