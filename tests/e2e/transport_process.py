"""One transport in a process of its own, to be killed and stopped as a machine would; asked over stdin, answers in JSON.

python -m tests.e2e.transport_process FOLDER HEALTH_INTERVAL_S [INITIAL_PEER]...
"""

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any, Self

import psutil

from swarm.config import NetworkSection
from swarm.errors import RequestError
from swarm.network.hivemind.transport import HivemindTransport
from swarm.records.identity import load_or_create
from tests.swarm_process import ModuleProcess

ECHO = "test/echo"
ANSWER_TIMEOUT_S = 20.0


class TransportProcess:
    """The side of the test. Use as an async context manager; kills what still runs at the end."""

    def __init__(self, folder: Path, *initial_peers: str, health_interval_s: float = 0.2) -> None:
        self.folder = folder
        self.peer_id = ""
        self.addresses: tuple[str, ...] = ()
        self.daemon_pid = 0
        self._arguments = (str(folder), str(health_interval_s), *initial_peers)
        self._process: ModuleProcess | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.to_thread(ModuleProcess, __name__, *self._arguments)
        started = await asyncio.to_thread(self._process.answer, ANSWER_TIMEOUT_S)
        self.peer_id, self.daemon_pid = started["peer_id"], started["daemon_pid"]
        self.addresses = tuple(started["addresses"])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.signal(signal.SIGCONT)
            await self.kill_9()

    async def kill_9(self) -> None:
        assert self._process is not None
        await asyncio.to_thread(self._process.kill)

    async def stop(self) -> None:
        """End it in good order."""
        assert self._process is not None
        await asyncio.to_thread(self._process.stop, ANSWER_TIMEOUT_S)

    def signal(self, number: int) -> None:
        """To the process and its daemon."""
        assert self._process is not None
        for pid in (self._process.pid, self.daemon_pid):
            psutil.Process(pid).send_signal(number)

    async def neighbors(self) -> set[str]:
        """Peer ids in its routing table."""
        return set(await self.ask("neighbors"))

    async def reaches(self, peer_id: str) -> bool:
        """Whether a peer answers its request."""
        return await self.ask("reach", peer_id)

    async def ask(self, *words: str) -> Any:
        assert self._process is not None
        return await asyncio.to_thread(self._process.ask, " ".join(words), ANSWER_TIMEOUT_S)


async def _echo(peer_id: str, request: bytes) -> bytes:
    return request


async def _reach(transport: HivemindTransport, peer_id: str) -> bool:
    try:
        answer = await transport.request(peer_id, ECHO, b"hi", max_response_bytes=10, deadline_s=5.0)
    except RequestError:
        return False
    return answer == b"hi"


async def _serve(folder: Path, health_interval_s: float, initial_peers: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    config = NetworkSection.model_validate({"initial_peers": initial_peers})
    identity = load_or_create(folder / "identity.key")
    transport = HivemindTransport(config, identity, folder, health_interval_s=health_interval_s)
    transport.serve(ECHO, _echo, max_request_bytes=10)
    await transport.start()
    session = transport._session
    assert session is not None
    told = {"peer_id": transport.peer_id, "addresses": transport.addresses(), "daemon_pid": session.daemon_pid}
    print(json.dumps(told), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        question, *arguments = line.split()
        if question == "neighbors":
            session = transport._session
            answer: Any = sorted(session.neighbors) if session is not None else []
        else:
            answer = await _reach(transport, *arguments)
        print(json.dumps(answer), flush=True)
    await transport.stop()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2]), tuple(sys.argv[3:])))
