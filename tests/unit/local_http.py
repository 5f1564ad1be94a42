"""A small HTTP server on loopback that answers as told and keeps what came."""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[str, str, bytes], tuple[int, bytes] | tuple[int, bytes, dict[str, str]]]
"""(method, path, body) → (status, body as JSON or whatever was asked for, further headers)."""

CUT_AFTER_BYTES = 1000


@dataclass
class Received:
    address: str
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    """Set with each request."""


@contextmanager
def local_http(
    answer: Answer, content_type: str = "application/json", *, cuts: Mapping[str, int] | None = None
) -> Iterator[Received]:
    """`cuts`: {path: how many requests to it are cut off after a part of their body}."""
    cut = dict(cuts or {})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            if self.path in cut:
                cut[self.path] -= 1
                if cut[self.path] >= 0:
                    self.rfile.read(CUT_AFTER_BYTES)
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
            body = self._body()
            received.requests.append((self.command, self.path, body))
            status, content, *headers = answer(self.command, self.path, body)
            received.arrived.set()
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            for name, value in (headers[0] if headers else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content if self.command != "HEAD" else b"")

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = do_HEAD = _respond

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Received(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
