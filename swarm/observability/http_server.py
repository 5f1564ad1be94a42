"""GET /metrics (Prometheus), GET /health (JSON) and whatever pages it is given, inside the event loop of a running node."""

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from swarm.config import ObservabilitySection
from swarm.errors import ConfigError
from swarm.fair_places import FairPlaces
from swarm.observability.bounded_http import ANSWERS_PER_S, BACKLOG, BURST_ANSWERS, MAX_CONNECTIONS, BoundedHttp
from swarm.observability.guard import Guard
from swarm.observability.metrics import Metrics
from swarm.observability.turns import Turns

logger = logging.getLogger(__name__)


def http_address(host: str, port: int) -> str:
    """Such as http://127.0.0.1:8080/. Of a server that is bound to all addresses: the one on this machine."""
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class HttpServer:
    """Started and stopped by the node; leaves signal handling to it. `Guard` decides who may ask, for whatever it serves."""

    def __init__(
        self,
        config: ObservabilitySection,
        metrics: Metrics,
        health: Callable[[], dict[str, Any]],
        pages: Sequence[BaseRoute] = (),
    ) -> None:
        self.port = 0
        """Actual port while running, else 0."""
        self._config = config
        self._metrics = metrics
        self._health = health
        self._pages = pages
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigError where the address cannot be bound."""
        if not self._config.http:
            return
        listener = self._bind()
        self.port = listener.getsockname()[1]
        routes = [Route("/metrics", self._get_metrics), Route("/health", self._get_health), *self._pages]
        settings = uvicorn.Config(
            Starlette(routes=routes, middleware=[Middleware(Guard, names=self._config.http_names)]),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            http=cast(
                Any,
                partial(
                    BoundedHttp,
                    FairPlaces(MAX_CONNECTIONS, newest_wins=True),
                    Turns(ANSWERS_PER_S, BURST_ANSWERS),
                ),
            ),  # it is only called
            proxy_headers=False,  # places go by the address of the connection, not by what a header says of it
            ws="none",
            backlog=BACKLOG,
            server_header=False,
        )
        self._server = uvicorn.Server(settings)
        # `_serve` is `serve` without the signal handlers, which belong to the node
        self._serving = asyncio.create_task(self._server._serve([listener]))
        what = "the page, metrics and health" if self._pages else "metrics and health"
        logger.info("%s on %s", what, http_address(self._config.http_host, self.port))

    async def stop(self) -> None:
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        self._server, self.port = None, 0

    def _bind(self) -> socket.socket:
        host, port = self._config.http_host, self._config.http_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)  # whoever hears of the port may come
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"observability.http_port must be free, got {host}:{port}: {error.strerror}; "
                "set observability.http_port = 0 to take any"
            ) from None
        return listener

    async def _get_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _get_health(self, request: Request) -> Response:
        return JSONResponse(self._health())
