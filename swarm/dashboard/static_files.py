"""The static files of the pages, read once from the package. No requested path is ever opened.

`make_token` makes the secret with which a page controls its node: random, in a file that only its owner can read.
"""

import contextlib
import hmac
import re
import secrets
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarm.errors import NodeNotRunningError
from swarm.machine.safe_files import read_file, replace_file

_FILE = "page.token"
_MAX_BYTES = 1024
_FORM = re.compile(r"[A-Za-z0-9_-]{43}")


def token_path(folder: Path) -> Path:
    return folder / _FILE


def make_token(folder: Path, name: str = _FILE) -> str:
    """The folder's token; a new one where there is none, or where others could have read it. Raises OSError."""
    path = folder / name
    with contextlib.suppress(OSError, ValueError):  # none, or a link: what is there is replaced
        is_private = path.lstat().st_mode & 0o077 == 0
        if (kept := _read(path)) and is_private:
            return kept
    token = secrets.token_urlsafe(32)
    replace_file(path, token + "\n")
    return token


def read_token(folder: Path) -> str:
    """Raises NodeNotRunningError where no node has made one."""
    try:
        return _read(token_path(folder))
    except (OSError, ValueError) as error:
        raise NodeNotRunningError(
            f"a node's folder must hold {_FILE}, got none that can be read in {folder} ({error}); start it with `swarm run`"
        ) from None


def is_token(given: str, token: str) -> bool:
    """In a time that says nothing about how much of it was right."""
    return hmac.compare_digest(given.encode(), token.encode())


def _read(path: Path) -> str:
    """Raises OSError, and ValueError for what is no token: it is printed, and becomes a part of an address."""
    token = read_file(path, _MAX_BYTES).decode("ascii").strip()
    if not _FORM.fullmatch(token):
        raise ValueError("it must hold 43 letters, digits, - or _")
    return token


_TYPES = {"css": "text/css", "js": "text/javascript", "html": "text/html", "svg": "image/svg+xml"}


class StaticFiles:
    """Of both pages."""

    def __init__(self) -> None:
        folder = resources.files("swarm.dashboard") / "static"
        self._files = {item.name: item.read_bytes() for item in folder.iterdir() if item.name[0] != "_"}

    def page(self, name: str, changes: Mapping[bytes, bytes] = MappingProxyType({})) -> Response:
        """One of the package's HTML files, with fixed texts of it changed."""
        content = self._files[name]
        for before, after in changes.items():
            content = content.replace(before, after)
        return Response(content, media_type="text/html; charset=utf-8")

    def routes(self) -> list[Route]:
        return [Route("/static/{name}", self.get)]

    async def get(self, request: Request) -> Response:
        """The file that the path's `name` is."""
        name = request.path_params["name"]
        content = self._files.get(name)
        if content is None:
            return Response("no such file\n", status_code=404, media_type="text/plain")
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(content, media_type=f"{kind}; charset=utf-8" if kind.startswith("text") else kind)
