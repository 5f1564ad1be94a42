"""`swarm dashboard`: the address of a node's page, or one page over several nodes."""

import contextlib
import html
import ipaddress
import signal
import socket
import tomllib
import webbrowser
from pathlib import Path

import typer

from swarm.cli.arguments import told_by_flags
from swarm.cli.node.status import start_command
from swarm.errors import ConfigError, NodeNotRunningError
from swarm.machine.node_folder import MAX_CONFIG_BYTES
from swarm.machine.safe_files import read_file, replace_file

_FLAGS = {"observability.http_port": "--port", "observability.http_host": "--host"}
"""What sets which setting of the overview."""


def dashboard(
    targets: list[str] = typer.Argument(
        None, metavar="[DIR | http://HOST:PORT...]", help="A node's folder (runs/node), or addresses of nodes."
    ),
    is_opened: bool = typer.Option(False, "--open", help="Open the page in a browser."),
    host: str = typer.Option("127.0.0.1", help="Address on which the overview listens."),
    port: int = typer.Option(8400, min=0, max=65535, help="Port of the overview; 0: a free port."),
    name: list[str] = typer.Option(None, help="Host name by which browsers may request the overview."),
) -> None:
    """Print the address of a node's page with the token for its controls, or serve one page over several nodes.

    A host name with several addresses is several nodes; it is looked up again every 15 s.
    """
    targets = targets or ["runs/node"]
    if any("://" in target for target in targets):
        _serve_overview(targets, host, port, name or [], is_opened)
        return
    if len(targets) > 1:
        raise ConfigError(
            f"there must be one folder or any number of addresses, got {len(targets)} folders; name http://HOST:PORT of each"
        )
    _show_node(Path(targets[0]), is_opened)


def _show_node(folder: Path, is_opened: bool) -> None:
    from swarm.dashboard.static_files import read_token
    from swarm.observability.status_file import read_status

    status = read_status(folder / "status.json")
    if not status.is_alive:
        raise NodeNotRunningError(
            f"the node must be running, got process {status.pid} that has ended, in {folder}; "
            f"start it again with {start_command(folder, status)}"
        )
    if not status.http_port:
        raise ConfigError(
            "the node must serve its page, got observability.http = false; set it and start the node again"
        )
    address = f"{_http_address(folder, status.http_port)}#token={read_token(folder)}"
    print(address)
    if is_opened:
        _open_unseen(folder, address)


def _http_address(folder: Path, port: int) -> str:
    """Of a page on this machine: the folder may be somebody else's, and what it names is opened in a browser."""
    from swarm.observability.http_server import http_address

    try:
        settings = tomllib.loads(read_file(folder / "config.toml", MAX_CONFIG_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        settings = {}
    section = settings.get("observability")
    host = section.get("http_host", "127.0.0.1") if isinstance(section, dict) else "127.0.0.1"
    if not _is_of_this_machine(host):
        raise ConfigError(
            f"observability.http_host must be an address of this machine, got {str(host)[:100]!r} in {folder}; "
            "if the node is yours, name its page to the browser by hand"
        )
    return http_address(host, port)


def _is_of_this_machine(host: object) -> bool:
    """Whether it is an address that a server can be bound to here. No name is looked up."""
    if host == "localhost":
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(str(host)).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except (OSError, ValueError, TypeError):
        return False
    return True


def _open_unseen(folder: Path, address: str) -> None:
    """By way of a file that only the owner can read: other users see what programs are started with."""
    path = folder / "page.open.html"
    replace_file(path, f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}">\n')
    webbrowser.open(path.resolve().as_uri())


def _serve_overview(targets: list[str], host: str, port: int, names: list[str], is_opened: bool) -> None:
    import asyncio

    from swarm.config import ObservabilitySection
    from swarm.dashboard.overview import Overview, parse_target
    from swarm.observability.http_server import http_address

    parsed = [parse_target(target) for target in targets]
    config = ObservabilitySection(http_host=host, http_port=port, http_names=tuple(names))

    async def serve() -> None:
        overview = Overview(parsed, config)
        with told_by_flags(_FLAGS):
            await overview.start()
        address = http_address(host, overview.port)
        print(f"all nodes on {address}; Ctrl-C ends it", flush=True)
        if is_opened:
            webbrowser.open(address)
        working = asyncio.ensure_future(overview.wait())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await working

    asyncio.run(serve())
