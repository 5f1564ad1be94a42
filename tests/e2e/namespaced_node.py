"""One transport in a process of its own, to be run inside a network namespace and told what to do over stdin.

    python -m tests.e2e.namespaced_node FOLDER SETTINGS_JSON
    ← {"peer_id", "addresses"}                      once, when it has started
    → {"call": "request", ...} ← {"result"} or {"error"}    one line of JSON each

Serves `test/body`: request [offset, bytes] as two big-endian 32-bit numbers, response that part of a fixed body.
"""

import asyncio
import json
import random
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.e2e.namespaces import Host

BODY_BYTES = 16 << 20
BODY_PROTOCOL = "test/body"
_PART_BYTES = 1 << 20
_DEADLINE_S = 60.0
_BODIES: dict[bytes, bytes] = {}
"""Groups that this process has published, by body hash."""


def body_of(peer_id: str) -> bytes:
    """As large as an adapter, and another one for each node."""
    return random.Random(peer_id).randbytes(BODY_BYTES)


class NamespacedNode:
    """The process, as a test sees it: started at once, ended by the context manager."""

    def __init__(self, host: Host, folder: Path, **settings: object) -> None:
        command = [*host.enter, sys.executable, "-m", "tests.e2e.namespaced_node", str(folder), json.dumps(settings)]
        folder.mkdir(parents=True)
        self._errors = (folder / "stderr.log").open("wb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self.log = folder / "stderr.log"

    def __enter__(self) -> Self:
        started = self._read()
        self.peer_id: str = started["peer_id"]
        self.addresses: list[str] = started["addresses"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # asks for an orderly end
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def call(self, name: str, **arguments: object) -> Any:
        """Have the node do something and return its result. Raises RuntimeError with the node's error."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the node has ended: {self.log.read_text()[-2000:]}")
        return json.loads(line)


async def _serve(folder: Path, settings: dict[str, Any]) -> None:
    from swarm.config import NetworkSection
    from swarm.network.hivemind.transport import HivemindTransport
    from swarm.records.identity import create
    from swarm.sharing.index import EntryValidator
    from tests.unit.experience_factory import SWARM_ID

    identity = create(folder / "identity.key")
    node = HivemindTransport(
        NetworkSection.model_validate(settings), identity, folder, EntryValidator(SWARM_ID), health_interval_s=1.0
    )
    body = body_of(node.peer_id)

    async def part(peer_id: str, request: bytes) -> bytes:
        offset, num_bytes = struct.unpack(">II", request)
        return body[offset : offset + num_bytes]

    async def rollouts(peer_id: str, request: bytes) -> bytes:
        return _BODIES[request]

    node.serve(BODY_PROTOCOL, part, max_request_bytes=8)
    node.serve("test/rollouts", rollouts, max_request_bytes=64)
    await node.start()
    try:
        _say(peer_id=node.peer_id, addresses=node.addresses())
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            call = json.loads(line)
            try:
                _say(result=await _CALLS[call.pop("call")](node, identity, **call))
            except Exception as error:  # the test sees it
                _say(error=f"{type(error).__name__}: {error}")
    finally:
        await node.stop()


def _say(**message: object) -> None:
    print(json.dumps(message), flush=True)


async def _state(node: Any, identity: Any) -> dict[str, Any]:
    """Where it is, whom it is connected to and how, and whether it hosts a part of the index."""
    session = node._session
    if session is None:
        return {"is_full": None, "addresses": [], "peers": {}, "neighbors": []}
    return {
        "is_full": session._role.is_full,
        "addresses": node.addresses(),
        "peers": await session.peers(),
        "neighbors": sorted(session.neighbors),
        "num_keys": len(session._node.protocol.storage),
    }


def _key(node: Any) -> str:
    """One key for all: in a swarm of this size there is a single shard, and the window does not matter here."""
    from swarm.sharing.index import experience_key
    from swarm.sharing.shard import shard_of
    from tests.unit.experience_factory import SWARM_ID

    return experience_key(SWARM_ID, shard_of(SWARM_ID, node.peer_id, 0, 0.0), 0.0)


async def _publish(node: Any, identity: Any, index: int) -> bool:
    """Sign a header of one group of rollouts, put it into the index and serve the body."""
    from swarm.sharing.index import subkey
    from tests.unit.experience_factory import body_and_header, group, signed

    body, header = body_and_header(group(index=index, author=identity.peer_id))
    header = replace(header, author=identity.peer_id, created_at=node.now(), expires_at=node.now() + 300)
    _BODIES[header.body_hash] = body
    record = signed(header, identity)
    return await node.store(_key(node), subkey(node.peer_id, index), record, header.expires_at)


async def _admit(node: Any, identity: Any) -> dict[str, list[int]]:
    """Read the index and take what others offer through the real door: {author: indices of the groups admitted}."""
    from tests.unit.experience_factory import admission

    door = admission(node.now)
    admitted: dict[str, list[int]] = {}
    for subkey, record in (await node.load(_key(node))).items():
        if subkey.startswith(node.peer_id):
            continue
        header = door.admit_header(record)
        body = await node.request(
            header.author, "test/rollouts", header.body_hash, max_response_bytes=1 << 20, deadline_s=20.0
        )
        groups = door.admit_body(header, body)
        admitted.setdefault(header.author, []).extend(group.task.index for group in groups)
    return admitted


async def _fetch(node: Any, identity: Any, peer_id: str) -> dict[str, Any]:
    """The whole body of a peer in parts; whether it is right, and how long it took."""
    start, parts = node.now(), []
    for offset in range(0, BODY_BYTES, _PART_BYTES):
        request = struct.pack(">II", offset, _PART_BYTES)
        parts.append(
            await node.request(peer_id, BODY_PROTOCOL, request, max_response_bytes=_PART_BYTES, deadline_s=_DEADLINE_S)
        )
    return {"is_right": b"".join(parts) == body_of(peer_id), "seconds": node.now() - start}


_CALLS = {"state": _state, "publish": _publish, "admit": _admit, "fetch": _fetch}

if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO)
    asyncio.run(_serve(Path(sys.argv[1]), json.loads(sys.argv[2])))
