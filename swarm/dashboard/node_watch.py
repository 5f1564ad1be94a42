"""Several nodes, asked again and again what they do; a name with several addresses is several nodes.

every 15 s  names ─▶ addresses      a node that is neither named any more nor answers is forgotten
every 3 s   all addresses, 16 at once, 3 s each ─▶ what they say of themselves, or why they say nothing
"""

import asyncio
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm.dashboard.shown import shown
from swarm.errors import ConfigError
from swarm.safe_files import parse_json

MAX_NODES = 256
POLL_INTERVAL_S = 3.0
RESOLVE_INTERVAL_S = 15.0
TIMEOUT_S = 3.0
"""For everything that is asked of one node."""
_MAX_AT_ONCE = 16
_MAX_SUMMARY_BYTES = 64 << 10
_MAX_VALUES = 100_000
"""Of one answer; a node's largest holds some ten thousand."""
UNPACKED = {"accept-encoding": "identity"}
"""Header of every question to a node."""
_MAX_CURVE_POINTS = 400

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Checked(BaseModel):
    """A part of what a node says of itself. All nodes are drawn together: a wrong type would cost the others their curves."""

    model_config = ConfigDict(strict=True)


class _Curve(_Checked):
    start: Annotated[list[Count], Field(max_length=_MAX_CURVE_POINTS)] = []
    reward: Annotated[list[Number | None], Field(max_length=_MAX_CURVE_POINTS)] = []

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.start) != len(self.reward):
            raise ValueError("a curve must have a reward for each start")
        return self


class _Summary(_Checked):
    version: str = ""
    name: str
    peer_id: str = ""
    phase: str = ""
    round: Count = 0
    started_at: Number | None = None
    reward: Number | None = None
    tokens_per_s: Number | None = None
    peers: Count | None = None
    swarm_groups: Count | None = None
    merges: Count | None = None
    curve: _Curve = _Curve()


@dataclass(frozen=True, slots=True)
class Target:
    """As a person names one or several nodes."""

    host: str
    port: int


@dataclass(slots=True)
class WatchedNode:
    """One address, and what is known of the node there."""

    address: str
    """Such as 10.0.0.2:8400."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The last one that came."""
    seen_at: float = 0.0
    """Seconds since the epoch; 0: it never answered."""
    error: str = "not asked yet"
    """Why it says nothing; empty while it answers."""

    @property
    def key(self) -> str:
        """In paths of the overview."""
        return self.address.replace("[", "").replace("]", "").replace(":", "-")


def parse_target(text: str) -> Target:
    """Of http://host:port. Raises ConfigError."""
    try:
        parts = urlsplit(text)
        if parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/") and not parts.query:
            return Target(parts.hostname, parts.port)
    except ValueError:
        pass
    raise ConfigError(f"a node's address must be http://HOST:PORT, got {text}; `swarm status` names the port")


class NodeWatch:
    """Runs on one loop; `work` until cancelled."""

    def __init__(
        self, targets: Sequence[Target], client: httpx.AsyncClient, clock: Callable[[], float] = time.time
    ) -> None:
        """`client`: without proxies, or what is asked of neighbours would leave the machine. `clock`: since the epoch."""
        self._targets = targets
        self._client = client
        self._clock = clock
        self._places = asyncio.Semaphore(_MAX_AT_ONCE)
        self.nodes: dict[str, WatchedNode] = {}

    async def work(self) -> None:
        """Ask for ever."""
        resolved_at = -RESOLVE_INTERVAL_S
        while True:
            if time.monotonic() - resolved_at >= RESOLVE_INTERVAL_S:
                resolved_at = time.monotonic()
                await self.resolve()
            await self.poll()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def resolve(self) -> None:
        """Look all names up; what a name server does not tell now is kept as long as it answers."""
        found = [address for part in await asyncio.gather(*map(_addresses, self._targets)) for address in part]
        self.nodes = {
            key: node for key, node in self.nodes.items() if node.address in found or (node.seen_at and not node.error)
        }
        for address in found:
            node = WatchedNode(address)
            if node.key not in self.nodes and len(self.nodes) < MAX_NODES:
                self.nodes[node.key] = node

    async def poll(self) -> None:
        """Ask every node once."""
        await asyncio.gather(*map(self._ask, list(self.nodes.values())))

    def listed(self) -> list[dict[str, Any]]:
        """For the overview page."""
        return [
            {
                "key": node.key,
                "address": node.address,
                "is_alive": not node.error,
                "error": node.error,
                "seen_at": node.seen_at,
                "summary": node.summary,
            }
            for node in self.nodes.values()
        ]

    async def fetch(self, node: WatchedNode, path: str, max_bytes: int) -> tuple[int, Any]:
        """(status, JSON) of one answer. Raises OSError, TimeoutError, httpx.HTTPError or ValueError."""
        address = f"http://{node.address}/{path}"
        async with asyncio.timeout(TIMEOUT_S), self._client.stream("GET", address, headers=UNPACKED) as answer:
            content = bytearray()
            async for part in unpacked(answer):
                content += part
                if len(content) > max_bytes:
                    raise ValueError(f"its answer is longer than {max_bytes} bytes")
            return answer.status_code, shown(parse_json(bytes(content), _MAX_VALUES))

    async def _ask(self, node: WatchedNode) -> None:
        async with self._places:
            try:
                status, summary = await self.fetch(node, "api/summary", _MAX_SUMMARY_BYTES)
            except TimeoutError:
                node.error = f"no answer within {TIMEOUT_S:g} s"
                return
            except (OSError, httpx.HTTPError, ValueError, RecursionError) as error:
                node.error = str(shown(str(error) or type(error).__name__))[:200]
                return
        try:
            checked = _Summary.model_validate(summary if status == 200 else None)
        except ValidationError:
            node.error = f"it answers, but not as a node does (status {status})"
            return
        node.summary, node.seen_at, node.error = checked.model_dump(), self._clock(), ""


def unpacked(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Its bytes as they came over the line. Raises ValueError where they are packed: a few could become gigabytes."""
    if (encoding := answer.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ValueError(f"its answer must not be packed, got content-encoding {encoding[:40]}")
    return answer.aiter_raw()


async def _addresses(target: Target) -> list[str]:
    """HOST:PORT of every address: those of version 4 where there are any, as one node often has one of each."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            infos = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    found = sorted({ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos}, key=_order)
    chosen = [ip for ip in found if ip.version == found[0].version]
    return [f"[{ip}]:{target.port}" if ip.version == 6 else f"{ip}:{target.port}" for ip in chosen]


def _order(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int]:
    return ip.version, int(ip)
