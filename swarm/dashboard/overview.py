"""One page over several nodes, which also gives a read-only view of the page of each node.

GET /                       all nodes
GET /node/KEY/              the page of one, from this package; only its data comes from the node
GET /node/KEY/api/…         state, rollouts, logs and events, passed on; of a node that has ended from its files

It asks the nodes repeatedly for their state. A name with several addresses stands for several nodes. A folder stands for the
nodes in it; of one that has ended its files are shown.

every 15 s  names, folders ─▶ addresses   a node that nothing leads to and that does not answer is removed
every 3 s   all addresses, 16 at once, 3 s each ─▶ their state, or why they do not answer
"""

import asyncio
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlencode, urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from swarm import __version__
from swarm.config import ObservabilitySection
from swarm.dashboard.feed import MAX_STREAMS, EventPlaces, EventResponse
from swarm.dashboard.node_page import (
    MAX_ADVICE,
    EndedNodes,
    folder_settings,
    log_query,
    range_query,
    read_history,
    rollout_query,
    summary_of,
)
from swarm.dashboard.shown import shown
from swarm.dashboard.static_files import StaticFiles
from swarm.errors import ConfigError, NodeNotRunningError
from swarm.machine.safe_files import parse_json
from swarm.observability.http_server import HttpServer
from swarm.observability.metrics import Metrics
from swarm.observability.status_file import NodeStatus, inner_folders, judge, read_status, shown_from

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
_MAX_PAIRS = 64

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Checked(BaseModel):
    """A part of what a node says of itself. All nodes are drawn together: a wrong type would cost the others their curves."""

    model_config = ConfigDict(strict=True)


class _Curve(_Checked):
    start: Annotated[list[Count], Field(max_length=_MAX_CURVE_POINTS)] = []
    time_s: Annotated[list[Number | None], Field(max_length=_MAX_CURVE_POINTS)] = []
    """Empty of a node whose version does not tell it."""
    reward: Annotated[list[Number | None], Field(max_length=_MAX_CURVE_POINTS)] = []

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.start) != len(self.reward) or len(self.time_s) not in (0, len(self.start)):
            raise ValueError("a curve must have a reward and a time for each start")
        return self


class _Pair(_Checked):
    peer_id: str
    groups_admitted: Count = 0
    bodies_taken: Count = 0


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
    verdict: str = ""
    why: str = ""
    advice: Annotated[list[str], Field(max_length=MAX_ADVICE)] = []
    own_groups: Count | None = None
    swarm_groups: Count | None = None
    merges: Count | None = None
    curve: _Curve = _Curve()
    held_out: _Curve = _Curve()
    exchange: Annotated[list[_Pair], Field(max_length=_MAX_PAIRS)] = []


@dataclass(frozen=True, slots=True)
class Target:
    """As a person names one or several nodes."""

    host: str
    port: int


@dataclass(slots=True)
class WatchedNode:
    """One address, and what is known of the node there."""

    address: str
    """Such as 10.0.0.2:8400; empty for a node of a folder that does not run."""
    label: str = ""
    """What its folder is called; empty for one that an address named."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The last one that came."""
    seen_at: float = 0.0
    """Seconds since the epoch; 0: it never answered."""
    folder: Path | None = None
    """Where the files of a node that no address leads to are."""
    error: str = "not asked yet"
    """Why it says nothing; empty while it answers."""

    @property
    def key(self) -> str:
        """In paths of the overview."""
        return (self.address or self.label).replace("[", "").replace("]", "").replace(":", "-").replace("/", "-")


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
        self, targets: Sequence[Target | Path], client: httpx.AsyncClient, clock: Callable[[], float] = time.time
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
        names = [target for target in self._targets if isinstance(target, Target)]
        found = [WatchedNode(address) for part in await asyncio.gather(*map(_addresses, names)) for address in part]
        folders = [target for target in self._targets if isinstance(target, Path)]
        found += await asyncio.to_thread(_in_folders, folders, self.nodes)
        wanted = {node.key for node in found}
        self.nodes = {
            key: node
            for key, node in self.nodes.items()
            if key in wanted or (node.address and node.seen_at and not node.error)
        }
        for node in found:
            if node.key not in self.nodes and len(self.nodes) < MAX_NODES:
                self.nodes[node.key] = node

    async def poll(self) -> None:
        """Ask every node once."""
        await asyncio.gather(*(self._ask(node) for node in list(self.nodes.values()) if node.address))

    def listed(self) -> list[dict[str, Any]]:
        """For the overview page."""
        return [
            {
                "key": node.key,
                "address": node.address,
                "label": node.label,
                "is_alive": not node.error,
                "has_page": bool(node.address or node.folder),
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
            node.summary = _Summary.model_validate(summary if status == 200 else None).model_dump()
        except ValidationError:
            node.error = f"it answers, but not as a node does (status {status})"
            return
        node.seen_at, node.error = self._clock(), ""


def unpacked(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Its bytes as they came over the line. Raises ValueError where they are packed: a few could become gigabytes."""
    if (encoding := answer.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ValueError(f"its answer must not be packed, got content-encoding {encoding[:40]}")
    return answer.aiter_raw()


def _in_folders(folders: Sequence[Path], known: Mapping[str, WatchedNode]) -> list[WatchedNode]:
    """The nodes of folders, each a node's or a testbed's. Those that have ended are read once, as `known` keeps them."""
    found: list[WatchedNode] = []
    for folder in folders:
        is_node = (folder / "status.json").exists()
        for part in ([folder] if is_node else inner_folders(folder))[:MAX_NODES]:
            name = part.resolve().name
            label = name if is_node or len(folders) == 1 else f"{folder.resolve().name}/{name}"
            try:
                status = read_status(part / "status.json")
                if not status.is_alive:
                    ended = WatchedNode("", label, seen_at=status.written_at, folder=part)
                    found.append(known.get(ended.key) or _ended(part, ended, status))
                elif status.http_port:
                    host, port = page_place(part, status.http_port)
                    found.append(WatchedNode(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", label))
                else:
                    found.append(WatchedNode("", label, folder=part, error="it serves no page (observability.http)"))
            except (NodeNotRunningError, ConfigError) as error:
                found.append(WatchedNode("", label, error=str(shown(str(error)))[:200]))
    return found


def _ended(folder: Path, node: WatchedNode, status: NodeStatus) -> WatchedNode:
    """`node` with what the files of a node that has ended say. Raises NodeNotRunningError where no node wrote them."""
    verdict = judge(status, time.time())
    node.error = verdict.why
    with shown_from(folder / "status.json"):
        try:
            series, evaluations, _ = read_history(folder)
            told = {**shown(asdict(status)), "verdict": verdict.word.value}
            node.summary = _Summary.model_validate(summary_of(told, series, evaluations)).model_dump()
        except (OSError, ValidationError):
            node.summary = {}
    return node


def page_place(folder: Path, port: int) -> tuple[str, int]:
    """Host and port of the page of a folder's node, which must be on this machine: the folder may be somebody else's, and what
    it names is asked, or opened in a browser. Raises ConfigError."""
    section = folder_settings(folder).get("observability")
    host = section.get("http_host", "127.0.0.1") if isinstance(section, dict) else "127.0.0.1"
    if not _is_of_this_machine(host):
        raise ConfigError(
            f"observability.http_host must be an address of this machine, got {str(host)[:100]!r} in {folder}; "
            "if the node is yours, name its page to the browser by hand"
        )
    return host, port


def _is_of_this_machine(host: object) -> bool:
    """Whether it is an address that a server can be bound to here. No name is looked up."""
    if host == "localhost":
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(str(host)).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except (OSError, ValueError, TypeError):
        return False
    return True


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


_MAX_STATE_BYTES = 8 << 20
_SILENCE_S = 45.0
"""Three heartbeats of a node's events."""
_PASSED_ON = ("state", "series", "rollouts", "config", "logs")
_QUERIES: dict[str, Callable[[Request], dict[str, Any]]] = {
    "rollouts": rollout_query, "logs": log_query, "series": range_query,
}  # fmt: skip
"""What of a request is passed on, checked."""


class Overview:
    """Serves until it is stopped."""

    def __init__(self, targets: Sequence[Target | Path], config: ObservabilitySection) -> None:
        """`config`: where to serve."""
        limits = httpx.Limits(max_connections=MAX_STREAMS + 32, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False, limits=limits, timeout=_SILENCE_S)
        self.watch = NodeWatch(targets, self._client)
        self._ended = EndedNodes()
        self._files = StaticFiles()
        self._places = EventPlaces()
        self._server = HttpServer(config, Metrics(), self._health, self._routes())
        self._working: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Raises ConfigError where the address cannot be bound."""
        await self._server.start()
        self._working = asyncio.create_task(self.watch.work())

    async def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        await self._client.aclose()
        await self._server.stop()

    async def wait(self) -> None:
        """After `start`: until cancelled. What ends the asking of nodes is a bug, and raised. Stops it all."""
        assert self._working is not None
        try:
            await self._working
        finally:
            await self.stop()

    def _routes(self) -> list[BaseRoute]:
        return [
            Route("/", self._get_overview),
            Route("/api/nodes", self._get_nodes),
            Route("/node/{key}/", self._get_node),
            Route("/node/{key}/api/events", self._get_events),
            Route("/node/{key}/api/{what}", self._pass_on),
            Route("/node/{key}/static/{name}", self._files.get),
            *self._files.routes(),
        ]

    def _health(self) -> dict[str, Any]:
        nodes = self.watch.nodes.values()
        return {"phase": "serving", "nodes": len(nodes), "nodes_alive": sum(not node.error for node in nodes)}

    async def _get_overview(self, request: Request) -> Response:
        return self._files.page("overview.html")

    async def _get_nodes(self, request: Request) -> Response:
        return JSONResponse({"version": __version__, "nodes": self.watch.listed()})

    async def _get_node(self, request: Request) -> Response:
        if self._node(request) is None:
            return _no_such_node()
        return self._files.page("node.html", {b'data-mode="node"': b'data-mode="viewed"'})

    async def _pass_on(self, request: Request) -> Response:
        node, what = self._node(request), request.path_params["what"]
        if node is None or what not in _PASSED_ON:
            return _no_such_node()
        if node.folder is not None:
            return await self._ended.answer(node.folder, what, request) or _no_such_node()
        try:
            asked = _QUERIES[what](request) if what in _QUERIES else {}
            query = f"?{urlencode(asked)}" if asked else ""
            status, content = await self.watch.fetch(node, f"api/{what}{query}", _MAX_STATE_BYTES)
        except (OSError, TimeoutError, httpx.HTTPError, ValueError, RecursionError):
            return JSONResponse({"error": "the node does not answer"}, status_code=502)
        return JSONResponse(content, status_code=status if status in (200, 400, 401, 503) else 502)

    async def _get_events(self, request: Request) -> Response:
        node = self._node(request)
        if node is None or not node.address:
            return _no_such_node()
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return EventResponse(self._events(node, after[:64]), self._places)

    async def _events(self, node: WatchedNode, after: str) -> AsyncIterator[bytes]:
        """As the node sends them; they end when it does, and the browser comes back."""
        try:
            address = httpx.URL(f"http://{node.address}/api/events", params={"after": after} if after else {})
            async with self._client.stream("GET", address, headers=UNPACKED) as answer:
                if answer.status_code != 200:
                    return
                async for part in unpacked(answer):
                    yield part
        except (OSError, httpx.HTTPError, ValueError):
            return

    def _node(self, request: Request) -> WatchedNode | None:
        return self.watch.nodes.get(request.path_params["key"])


def _no_such_node() -> Response:
    return JSONResponse({"error": "no such node here, or not any more"}, status_code=404)
