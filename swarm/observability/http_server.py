"""Serves /metrics (Prometheus), /health (JSON) and further pages inside the event loop of a running node.

Connections and requests are bounded. uvicorn accepts any number of connections, waits for ever for idle ones and answers
without limit, but each connection needs a file descriptor, and each answer takes time of the loop that serves the peers.

`Guard` refuses requests that another site makes through a browser, by a host name that points here or by a form:

Host    an address, localhost or a configured name   else 421: a page elsewhere cannot rename itself into this one
Origin  the same host, if it is given                 else 403
        if the browser names another site:         links to a page are followed, all else is 403
answers forbid the browser: no foreign script, no frame, no guessing of types, no referrer
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.config import ObservabilitySection
from swarm.errors import ConfigError
from swarm.limits.connection_slots import ConnectionSlots, network_of
from swarm.limits.turn_queue import FairRateLimiter
from swarm.observability.metrics import Metrics

logger = logging.getLogger(__name__)


MAX_CONNECTIONS = 128
"""At a time. Beyond that a new one is taken in place of the oldest one of the address that has most: programs of one machine
share its address, and one that holds connections must not keep the others out."""
HEAD_TIMEOUT_S = 10.0
"""For the head of a request, from the connection or from its first bytes on."""
BACKLOG = 32
"""Connections that wait to be accepted, which asyncio does all at once."""
ANSWERS_PER_S = 50.0
BURST_ANSWERS = 200
"""A page and all that it loads, several times over."""


class BoundedHttp(H11Protocol):
    """One connection. Made by `uvicorn.Config(http=...)`, with places and turns of its server before uvicorn's own arguments.

    The newest wins a place: else a connection may find none.
    """

    def __init__(self, places: ConnectionSlots, turns: FairRateLimiter, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._places = places
        self._place = ExitStack()
        self._turns = turns
        self._address = ""
        self._held: bytes | None = None  # what was read and has to wait for its turn
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._address = network_of((transport.get_extra_info("peername") or [""])[0])
        self._place.enter_context(self._places.hold(self._address, transport.abort))
        super().connection_made(transport)
        self._expect_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.close()
        for what in ("read", "answer"):
            self._turns.leave(self._address, (self, what))
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._held is not None:
            self._held += data
        else:
            self._held = data
            self._turns.take(self._address, (self, "read"), self._go_on)
        if self._held is not None:
            self.transport.pause_reading()  # again, where uvicorn has resumed it meanwhile

    def _go_on(self) -> None:
        data, self._held = self._held or b"", None
        if not self.flow.read_paused:  # else uvicorn waits for something
            self.transport.resume_reading()
        super().data_received(data)
        if self._is_answering:
            self._forget_deadline()
        elif self._deadline is None:
            self._expect_a_head()

    def on_response_complete(self) -> None:
        """The next request, where it has come with this one, waits for a turn, too."""
        if self.conn.trailing_data[0]:
            self._turns.take(self._address, (self, "answer"), super().on_response_complete)
        else:
            super().on_response_complete()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_a_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_answering:
            self.transport.abort()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Its last part has the browser itself refuse text where markup is meant, such as for innerHTML."""
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware; streams pass through as they are."""

    def __init__(self, app: ASGIApp, names: Collection[str] = ()) -> None:
        """`names`: hosts by which the server may be asked, beside addresses and localhost."""
        self._app = app
        self._names = {name.lower().rstrip(".") for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, method: str, path: str, headers: Headers) -> PlainTextResponse | None:
        host = headers.get("host", "")
        if not self._is_own(host):
            return PlainTextResponse(
                "this server must be asked by an address or localhost, got another name; "
                "add it to observability.http_names (--name of `swarm dashboard` and `swarm serve`)\n",
                status_code=421,
            )
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        is_link = headers.get("sec-fetch-mode") == "navigate" and "/api/" not in path
        is_reading = method in ("GET", "HEAD")
        if site not in ("same-origin", "none") and not (is_reading and is_link):
            return PlainTextResponse("asked for by another site\n", status_code=403)
        if origin is not None and origin.partition("://")[2] != host:
            return PlainTextResponse("asked for by another site\n", status_code=403)
        return None

    def _is_own(self, host: str) -> bool:
        name = host_name(host)
        if name == "localhost" or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class BearerToken:
    """ASGI middleware that lets in whoever sends the token as `Authorization: Bearer`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token):
            await self._app(scope, receive, send)
            return
        message = "the token is missing or wrong; send it as Authorization: Bearer TOKEN"
        error = {"message": message, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
        refusal = JSONResponse({"error": error}, status_code=401, headers={"www-authenticate": "Bearer"})
        await refusal(scope, receive, send)


def host_name(host: str) -> str:
    """Of a Host header, without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


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
        token: str | None = None,
    ) -> None:
        """`pages` are read at the start. With a `token` everything is for those alone who send it; see `BearerToken`."""
        self.port = 0
        """Actual port while running, else 0."""
        self._config = config
        self._metrics = metrics
        self._health = health
        self._pages = pages
        self._token = token
        self._listener: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigError where the address cannot be bound."""
        if not self._config.http:
            return
        self.bind()
        assert self._listener is not None
        routes = [Route("/metrics", self._get_metrics), Route("/health", self._get_health), *self._pages]
        settings = uvicorn.Config(
            Starlette(routes=routes, middleware=self._guards()),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            http=cast(
                Any,
                partial(
                    BoundedHttp,
                    ConnectionSlots(MAX_CONNECTIONS, newest_wins=True),
                    FairRateLimiter(ANSWERS_PER_S, BURST_ANSWERS),
                ),
            ),  # it is only called
            proxy_headers=False,  # places go by the address of the connection, not by what a header says of it
            ws="none",
            backlog=BACKLOG,
            server_header=False,
        )
        self._server = uvicorn.Server(settings)
        # `_serve` is `serve` without the signal handlers, which belong to the node
        self._serving = asyncio.create_task(self._server._serve([self._listener]))
        what = "the page, metrics and health" if self._pages else "metrics and health"
        logger.info("%s on %s", what, http_address(self._config.http_host, self.port))

    async def stop(self) -> None:
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        self._server, self._listener, self.port = None, None, 0

    def _guards(self) -> list[Middleware]:
        guard = Middleware(Guard, names=self._config.http_names)
        return [guard, Middleware(BearerToken, token=self._token)] if self._token else [guard]

    def bind(self) -> None:
        """Take the port, where clients then wait for `start`. Raises ConfigError where the address cannot be bound."""
        if self._listener is not None:
            return
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
        self._listener, self.port = listener, listener.getsockname()[1]

    async def _get_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _get_health(self, request: Request) -> Response:
        return JSONResponse(self._health())
