"""`swarm serve`: the policy of a node behind an API that clients of OpenAI's speak."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.arguments import load_config, told_by_flags
from swarm.cli.policy.saved_policy import BEST, config_arguments, load_saved_policy
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from swarm.observability.http_server import HttpServer
    from swarm.serving.served_policy import ServedPolicy

_FLAGS = {
    "observability.http_port": "--port",
    "observability.http_host": "--host",
    "observability.http_names": "--name",
}
TOKEN_FILE = "serve.token"  # noqa: S105  the name of a file
CONTEXT = 4096
"""Default of the most tokens of a prompt with its answer."""


def serve(
    folder: Path = typer.Argument(Path("runs/node"), metavar="[DIR]", help="A node's folder."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on. All but loopback needs a token."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0: a free port."),
    best: bool = typer.Option(False, "--best", help=BEST),
    base: bool = typer.Option(False, "--base", help="Serve the base without its adapter, too, as NAME-base."),
    reload: bool = typer.Option(False, "--reload", help="Take newer checkpoints as the node writes them."),
    with_token: bool = typer.Option(False, "--token", help="Ask for the token on loopback, too."),
    name: list[str] = typer.Option(None, help="Host name by which clients may ask, besides addresses and localhost."),
    context: int = typer.Option(
        CONTEXT, min=2, help="Most tokens of a prompt with its answer, if the base has as many."
    ),
    max_answers: int = typer.Option(256, min=1, help="Most answers that are sampled or wait; more are refused (429)."),
) -> None:
    """Serve the trained policy with an OpenAI-compatible API until Ctrl-C.

    The model is called like the folder. On another address than loopback,
    clients send the token of DIR/serve.token as their API key.

    Reads: config.toml and the newest checkpoint of DIR.
    Writes: DIR/serve.token, where a token is asked for.

    Examples:
      swarm serve runs/mine
      swarm serve runs/mine --base --port 8001
      swarm serve runs/mine --host 0.0.0.0 --name models.example.org

    Exit codes: 0 done, 3 configuration, 5 policy, 8 no checkpoint, 10 memory.
    """
    if best and reload:
        raise ConfigError("--reload takes the newest checkpoints, so it goes without --best; leave one out")
    config = load_config(config_arguments(None, folder))
    token = _make_token(folder) if with_token or not _is_loopback(host) else ""
    pages: list[BaseRoute] = []
    server = _bound({"http_host": host, "http_port": port, "http_names": name or []}, pages, token)
    policy, round = load_saved_policy(config, best=best)
    assert round is not None, "only a base has none"
    import asyncio

    from swarm.serving.served_policy import ServedPolicy

    async def run() -> None:
        async with ServedPolicy(
            policy, config, round, context=context, max_answers=max_answers, with_base=base
        ) as served:
            await _serve(served, folder, server, pages, reload=reload, says=_said(host, server.port, folder, token))

    asyncio.run(run())


async def _serve(
    served: "ServedPolicy", folder: Path, server: "HttpServer", pages: "list[BaseRoute]", *, reload: bool, says: str
) -> None:
    """Serve until SIGINT or SIGTERM."""
    import asyncio
    import signal

    from swarm.serving.openai_api import OpenAIApi

    api = OpenAIApi(served, folder.resolve().name)
    pages += api.routes()
    await server.start()
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    following = asyncio.create_task(served.follow()) if reload else None
    print(f"{' and '.join(api.names)}, round {served.round}, {says}", flush=True)
    try:
        await ending.wait()
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await server.stop()


def _bound(settings: dict[str, Any], pages: "list[BaseRoute]", token: str) -> "HttpServer":
    """Take the port before the policy is loaded. Raises ConfigError where it is not free."""
    from swarm.config import parse
    from swarm.observability.http_server import HttpServer
    from swarm.observability.metrics import Metrics

    with told_by_flags(_FLAGS):
        server = HttpServer(
            parse({"observability": settings}).observability, Metrics(), lambda: {"phase": "serving"}, pages, token
        )
        server.bind()
    return server


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _make_token(folder: Path) -> str:
    from swarm.dashboard.static_files import make_token

    return make_token(folder, TOKEN_FILE)


def _said(host: str, port: int, folder: Path, token: str) -> str:
    from swarm.observability.http_server import http_address

    asks = f"; the API key is in {folder / TOKEN_FILE}" if token else ""
    return f"on {http_address(host, port)}v1{asks}; Ctrl-C ends it"
