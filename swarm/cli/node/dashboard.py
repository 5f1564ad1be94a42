"""`swarm dashboard`: the address of a node's page, or one page over several nodes."""

import contextlib
import html
import shlex
import signal
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.arguments import told_by_flags
from swarm.cli.node.status import start_command
from swarm.errors import ConfigError, NodeNotRunningError
from swarm.machine.safe_files import replace_file

if TYPE_CHECKING:
    from swarm.observability.status_file import NodeStatus

_FLAGS = {"observability.http_port": "--port", "observability.http_host": "--host"}
"""What sets which setting of the overview."""


def dashboard(
    targets: list[str] = typer.Argument(
        None,
        metavar="[DIR | http://HOST:PORT...]",
        help="A node's folder (runs/node): its page. A testbed's folder, several folders or addresses: a page over all.",
    ),
    is_opened: bool = typer.Option(False, "--open", help="Open the page in a browser."),
    host: str = typer.Option("127.0.0.1", help="Address on which the overview listens."),
    port: int = typer.Option(8400, min=0, max=65535, help="Port of the overview; 0: a free port."),
    name: list[str] = typer.Option(None, help="Host name by which browsers may request the overview."),
) -> None:
    """Print the address of a node's page with the token for its controls, or serve one page over several nodes.

    A node serves its page while it runs. The page over several nodes also shows those that have ended: name their parent
    folder, as in `swarm dashboard runs`.

    A host name with several addresses is several nodes. Names and folders are looked at again every 15 s, so that nodes may
    come and go.

    Examples:
      swarm dashboard runs/mine --open
      swarm dashboard runs/testbed
      swarm dashboard http://10.0.0.2:8400 http://node:8400
    """
    from swarm.observability.status_file import inner_folders

    targets = targets or ["runs/node"]
    folders = [Path(target) for target in targets if "://" not in target]
    if len(targets) == 1 and folders and ((folders[0] / "status.json").exists() or not inner_folders(folders[0])):
        _show_node(folders[0], is_opened)
        return
    for folder in folders:
        if not (folder / "status.json").exists() and not inner_folders(folder):
            raise NodeNotRunningError(
                f"a node's or a testbed's folder must hold status.json, got none in {folder}; name another folder"
            )
    _serve_overview(targets, host, port, name or [], is_opened)


def _show_node(folder: Path, is_opened: bool) -> None:
    from swarm.dashboard.overview import page_place
    from swarm.dashboard.static_files import read_token
    from swarm.observability.http_server import http_address
    from swarm.observability.status_file import read_status

    status = read_status(folder / "status.json")
    if not status.is_alive:
        raise NodeNotRunningError(
            f"the node in {folder} must be running, got process {status.pid}, which has ended; "
            f"start it again with {start_command(folder, status)}{_afterwards(folder, status)}"
        )
    if not status.http_port:
        raise ConfigError(
            "the node must serve its page, got observability.http = false; set it and start the node again"
        )
    host, port = page_place(folder, status.http_port)
    address = f"{http_address(host, port)}#token={read_token(folder)}"
    print(address)
    if is_opened:
        _open_unseen(folder, address)


def _afterwards(folder: Path, status: "NodeStatus") -> str:
    """What shows a node that has ended; empty for a stage or a bootstrap peer, which have no rounds."""
    if status.command:
        return ""
    node, parent = (shlex.quote(str(path)) for path in (folder, folder.parent if folder.name else ".."))
    return f"; `swarm report {node}` has its curves, and `swarm dashboard {parent}` is a page over all nodes there, ended or not"


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

    parsed = [parse_target(target) if "://" in target else Path(target) for target in targets]
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
