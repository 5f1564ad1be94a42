"""Reads and stores manifests: a file, a web address, and the folder of the node that joined with one."""

import http.client
import ipaddress
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from swarm.errors import ManifestError
from swarm.machine.safe_files import SHARED, open_to_read, replace_file
from swarm.manifest.manifest import MAX_BYTES, Manifest, changes, parse, shown

FETCH_TIMEOUT_S = 20.0
"""Longest wait for a manifest from the web, redirects and slow servers included."""
_SCHEMES = ("http://", "https://")


def read_manifest(source: str, expected_founder: str | None = None, *, timeout_s: float = FETCH_TIMEOUT_S) -> Manifest:
    """Read the manifest in a file or at an http(s) address, and check its signature. Raises ManifestError."""
    return parse(fetch(source, timeout_s), expected_founder)


def fetch(source: str, timeout_s: float = FETCH_TIMEOUT_S) -> bytes:
    """Read at most MAX_BYTES + 1 bytes of a file or an http(s) address. Raises ManifestError."""
    try:
        if source.lower().startswith(_SCHEMES):
            return _within(timeout_s, lambda: _download(source, timeout_s), source)
        if "://" in source:
            raise ManifestError(f"a manifest must be a file or an http(s) address, got {source}; download it first")
        with open_to_read(Path(source).resolve()) as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ManifestError(
            f"a manifest must be an existing file or an http(s) address, got {source}; check the path"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ManifestError(
            f"a manifest must be readable, got {source}: {_reason(error)}; check the path or address"
        ) from None


def _reason(error: Exception) -> str:
    """Return the system's message without its number. A server's message is text of strangers."""
    is_local = isinstance(error, PermissionError | NotADirectoryError)
    return str(error.strerror) if is_local else shown(error)


def check_joined(joined_file: Path, manifest: Manifest, accepted_edition: int | None = None) -> list[str]:
    """Return what differs from `joined_file`, the manifest that a node joined with; nothing where it has joined with none.

    The first manifest that a node's folder joins with is trusted. From then on only those of the same founder are
    accepted, no earlier edition, and where `changes` finds something, only the edition that the operator accepts by its
    number. Raises ManifestError for all others.
    """
    if not joined_file.exists():
        return []
    known = parse(fetch(str(joined_file)))
    if known.id != manifest.id:
        raise ManifestError(
            f"a node's folder must stay with its swarm, {known.name} of {known.founder_name} ({known.founder}), got "
            f"{manifest.name} of {manifest.founder_name} ({manifest.founder}); set another node.dir"
        )
    if known.edition > manifest.edition:
        raise ManifestError(
            f"a manifest must not be older than edition {known.edition}, which this node knows, got {manifest.edition}; "
            f"ask the founder for a newer one, or use {joined_file}"
        )
    found = changes(known, manifest)
    if found and accepted_edition != manifest.edition:
        raise ManifestError(
            f"a manifest must be what this node joined with in edition {known.edition}, or be accepted, got edition "
            f"{manifest.edition} with: {'; '.join(found)}. If you agree, add --accept-edition "
            f"{manifest.edition}; to go on without it, use {joined_file}"
        )
    return found


def write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing. Raises ManifestError."""
    try:
        replace_file(path, text, SHARED)
    except OSError as error:
        raise ManifestError(f"a manifest must be writable, got {path}: {error}; check the folder") from None


class _Dialler:
    """Opens the connections of one download: to public addresses, and to the address that the operator typed.

    The server at a manifest's address may redirect the reader, and the owner of a name decides what it resolves to.
    Neither may lead to the own machine or network, where a request could have any effect. A proxy of the operator is
    dialled wherever it is, and resolves names itself.
    """

    def __init__(self, url: str) -> None:
        host = urllib.parse.urlsplit(url).hostname or ""
        self._typed = host if host == "localhost" or _is_number(host) else ""
        proxies = map(urllib.parse.urlsplit, urllib.request.getproxies().values())
        self._proxies = {(proxy.hostname, proxy.port) for proxy in proxies}

    def connect(self, place: tuple[str, int], timeout: float, source: object = None) -> socket.socket:
        """Connect as `socket.create_connection` does. Raises ManifestError for an address that is not public."""
        host, port = place
        numbers = [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        if place not in self._proxies:
            for number in numbers:
                self.check(host, number)
        return socket.create_connection((numbers[0], port), timeout)

    def check(self, host: str, number: str) -> None:
        """Raise ManifestError where `host`, which stands for the address `number`, must not be dialled."""
        if host != self._typed and not ipaddress.ip_address(number.partition("%")[0]).is_global:
            raise ManifestError(
                f"a manifest must come from a public address, or from one that you type as a number, got {shown(host)} at "
                f"{number}; download it yourself"
            )


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Http(http.client.HTTPConnection):
    def __init__(self, host: str, *, dialler: _Dialler, **options: Any) -> None:
        super().__init__(host, **options)
        self._create_connection = dialler.connect


class _Https(http.client.HTTPSConnection):
    def __init__(self, host: str, *, dialler: _Dialler, **options: Any) -> None:
        super().__init__(host, **options)
        self._create_connection = dialler.connect


class _Web(urllib.request.HTTPRedirectHandler, urllib.request.HTTPSHandler):
    """Requests and redirects of one download: only web addresses, and only secure ones after a secure one."""

    def __init__(self, dialler: _Dialler) -> None:
        super().__init__()
        self._dialler = dialler

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Http, dialler=self._dialler), req)  # type: ignore[arg-type]

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Https, dialler=self._dialler), req)  # type: ignore[arg-type]

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: object,
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        allowed = ("https://",) if req.full_url.lower().startswith("https://") else _SCHEMES
        if not newurl.lower().startswith(allowed):
            raise ManifestError(f"a manifest's address must not lead elsewhere, got a redirect to {shown(newurl)}")
        host = urllib.parse.urlsplit(newurl).hostname or ""
        if _is_number(host):  # a proxy would dial it unchecked
            self._dialler.check(host, host)
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _download(url: str, timeout_s: float) -> bytes:
    opener = urllib.request.OpenerDirector()  # only these handlers: no file:, no ftp:
    for handler in (
        urllib.request.ProxyHandler(),
        _Web(_Dialler(url)),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    with opener.open(url, timeout=timeout_s) as response:
        return response.read(MAX_BYTES + 1)


def _within(timeout_s: float, work: Callable[[], bytes], what: str) -> bytes:
    """Run `work` in a thread with a deadline, since a slow server never meets a socket's timeout. The thread may
    outlive it.
    """
    outcome: SimpleQueue[bytes | Exception] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put(work())
        except Exception as error:  # the caller raises it, whatever it is
            outcome.put(error)

    thread = threading.Thread(target=run, name="manifest", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise ManifestError(f"a manifest must arrive within {timeout_s:g} s, got less of {what}; try again")
    result = outcome.get()
    if isinstance(result, Exception):
        raise result
    return result
