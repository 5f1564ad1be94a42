"""Manifests where they are kept: a file, a web address, and the folder of the node that joined with one."""

import http.client
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from swarm.errors import ManifestError
from swarm.manifest import MAX_BYTES, Manifest, parse, shown
from swarm.safe_files import SHARED, open_to_read, replace_file

FETCH_TIMEOUT_S = 20.0
"""Longest wait for a manifest from the web, redirects and slow servers included."""
_SCHEMES = ("http://", "https://")


def read_manifest(source: str, expected_founder: str | None = None, *, timeout_s: float = FETCH_TIMEOUT_S) -> Manifest:
    """The manifest in a file or at an http(s) address, its signature checked. Raises ManifestError."""
    return parse(fetch(source, timeout_s), expected_founder)


def fetch(source: str, timeout_s: float = FETCH_TIMEOUT_S) -> bytes:
    """At most MAX_BYTES + 1 bytes of a file or an http(s) address. Raises ManifestError."""
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
    """What the system says, without its number; of a server that is text of strangers."""
    is_local = isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError)
    return str(error.strerror) if is_local else shown(error)


def check_joined(kept: Path, manifest: Manifest) -> None:
    """Raises ManifestError where `kept`, the manifest a node joined with, is of another swarm or a later edition.

    The first manifest that a node's folder joins with is trusted; from then on it takes only those of the same founder.
    """
    if not kept.exists():
        return
    known = parse(fetch(str(kept)))
    if known.id != manifest.id:
        raise ManifestError(
            f"a node's folder must stay with its swarm, {known.name} of {known.founder_name} ({known.founder}), got "
            f"{manifest.name} of {manifest.founder_name} ({manifest.founder}); set another node.dir"
        )
    if known.edition > manifest.edition:
        raise ManifestError(
            f"a manifest must not be older than edition {known.edition}, which this node knows, got {manifest.edition}; "
            f"ask the founder for a newer one, or use {kept}"
        )


def write_text(path: Path, text: str) -> None:
    """All of it or nothing at `path`. Raises ManifestError."""
    try:
        replace_file(path, text, SHARED)
    except OSError as error:
        raise ManifestError(f"a manifest must be writable, got {path}: {error}; check the folder") from None


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Redirects lead to web addresses, and from a secure one only to a secure one."""

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
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _download(url: str, timeout_s: float) -> bytes:
    opener = urllib.request.OpenerDirector()  # only these handlers: no file:, no ftp:
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _WebOnly(),
    ):
        opener.add_handler(handler)
    with opener.open(url, timeout=timeout_s) as response:
        return response.read(MAX_BYTES + 1)


def _within(timeout_s: float, work: Callable[[], bytes], what: str) -> bytes:
    """A server that trickles bytes never meets a socket's own timeout; the thread is left behind then."""
    outcome: SimpleQueue[bytes | Exception] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put(work())
        except Exception as error:  # the thread's edge: whatever it is, the caller raises it
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
