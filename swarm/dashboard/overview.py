"""One page over several nodes, and the way through it to the page of each: to look, not to touch.

GET /                       all nodes
GET /node/KEY/              the page of one, from this package; only its numbers come from the node
GET /node/KEY/api/…         state, rollouts and events, passed on
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from swarm import __version__
from swarm.config import ObservabilitySection
from swarm.dashboard.event_response import MAX_STREAMS, EventPlaces, EventResponse
from swarm.dashboard.node_watch import UNPACKED, NodeWatch, Target, WatchedNode, unpacked
from swarm.dashboard.static_files import StaticFiles
from swarm.observability.http_server import HttpServer
from swarm.observability.metrics import Metrics

_MAX_STATE_BYTES = 8 << 20
_SILENCE_S = 45.0
"""Three heartbeats of a node's events."""
_PASSED_ON = ("state", "rollouts")


class Overview:
    """Serves until it is stopped."""

    def __init__(self, targets: Sequence[Target], config: ObservabilitySection) -> None:
        """`config`: where to serve."""
        limits = httpx.Limits(max_connections=MAX_STREAMS + 32, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False, limits=limits, timeout=_SILENCE_S)
        self.watch = NodeWatch(targets, self._client)
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
        try:
            status, content = await self.watch.fetch(node, f"api/{what}", _MAX_STATE_BYTES)
        except (OSError, TimeoutError, httpx.HTTPError, ValueError, RecursionError):
            return JSONResponse({"error": "the node does not answer"}, status_code=502)
        return JSONResponse(content, status_code=status if status in (200, 401, 503) else 502)

    async def _get_events(self, request: Request) -> Response:
        node = self._node(request)
        if node is None:
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
