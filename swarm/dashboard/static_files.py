"""The files of the pages as they are in the package, read once; no path that comes in is ever opened."""

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
