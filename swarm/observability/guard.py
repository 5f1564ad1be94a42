"""Who may speak to a server of this software: no foreign site through a browser, by a name that it made point here, or by
a form.

Host    an address, localhost or a configured name   else 421: a page elsewhere cannot rename itself into this one
Origin  the same host, where it is told               else 403
        where a browser says that another site asks:  links to a page are followed, all else is 403
answers say to the browser: no foreign script, no frame, no guessing of types, no referrer
"""

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
                "add it to observability.http_names (--name of `swarm dashboard`)\n",
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


def host_name(host: str) -> str:
    """Of a Host header, without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")
