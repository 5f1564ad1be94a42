"""GET /metrics (Prometheus) and GET /health (JSON) of a running node, inside its own event loop."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarm.config import ObservabilitySection
from swarm.errors import ConfigError
from swarm.observability.metrics import Metrics

logger = logging.getLogger(__name__)


class HttpServer:
    """Started and stopped by the node; leaves signal handling to it."""

    def __init__(self, config: ObservabilitySection, metrics: Metrics, health: Callable[[], dict[str, Any]]) -> None:
        self.port = 0
        """Actual port while running, else 0."""
        self._config = config
        self._metrics = metrics
        self._health = health
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigError where the address cannot be bound."""
        if not self._config.http:
            return
        listener = self._bind()
        self.port = listener.getsockname()[1]
        app = Starlette(routes=[Route("/metrics", self._get_metrics), Route("/health", self._get_health)])
        settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)
        # `_serve` is `serve` without the signal handlers, which belong to the node
        self._serving = asyncio.create_task(self._server._serve([listener]))
        logger.info("metrics and health on http://%s:%d", self._config.http_host, self.port)

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
