#!/usr/bin/env python
"""What a container of docker-compose.yml runs: `bootstrap`, `node`, or any command line. `status` and `folder` tell of its node.

    bootstrap: founds the swarm once, and serves it ─▶ /swarm/NAME.swarm.toml ─▶ node: joins with it, as anyone would

Nodes of a scaled service differ as those of `swarm testbed` do, by their number, and each claims a folder of its own in /data,
so that what comes back, the same container or another in its place, goes on as who was there.
"""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

NAME = "compose"
DATA, SHARED = Path("/data"), Path("/swarm")
INDEX_PORT, GOSSIP_PORT, HTTP_PORT = 38000, 38001, 9100
MAX_NODES = 1000


def bootstrap(arguments: list[str]) -> list[str]:
    """Command line of the peer that others join through; founds the swarm where there is none."""
    from swarm.machine.node_folder import NodeFolder
    from swarm.records import identity

    files = NodeFolder(DATA / "bootstrap")
    files.create()
    peer_id = identity.load_or_create(files.identity).peer_id
    host = f"/dns4/{socket.gethostname()}"
    manifest = SHARED / f"{NAME}.swarm.toml"
    if not manifest.exists():
        address = f"{host}/tcp/{INDEX_PORT}/p2p/{peer_id}"
        create = ["swarm", "create", NAME, "--key", str(DATA / "founder.key"), "--bootstrap", address]
        subprocess.run(create, cwd=SHARED, check=True)
    return bootstrap_command(files.path, manifest, host, arguments)


def bootstrap_command(path: Path, manifest: Path, host: str, arguments: list[str]) -> list[str]:
    return [
        "swarm", "bootstrap", "--manifest", str(manifest), "--dir", str(path),
        "--listen", f"/ip4/0.0.0.0/tcp/{INDEX_PORT}", "--announce", f"{host}/tcp/{INDEX_PORT}",
        "--gossip-listen", f"/ip4/0.0.0.0/tcp/{GOSSIP_PORT}", "--gossip-announce", f"{host}/tcp/{GOSSIP_PORT}",
        "--http-host", "0.0.0.0", "--http-port", str(HTTP_PORT), *arguments,
    ]  # fmt: skip


def node(arguments: list[str]) -> list[str]:
    """Command line of this container's node."""
    number, _ = claim_folder(DATA, socket.gethostname(), numbered_by_compose())
    return node_command(number, DATA, SHARED / f"{NAME}.swarm.toml", arguments)


def node_command(number: int, data: Path, manifest: Path, arguments: list[str]) -> list[str]:
    """Of node `number`; `arguments` win over its profile."""
    from swarm.testbeds.profiles import PROFILES

    profile = PROFILES[(number - 1) % len(PROFILES)]
    settings = {
        "node.dir": json.dumps(str(data / f"node-{number}")),
        "network.listen": json.dumps([f"/ip4/0.0.0.0/tcp/{INDEX_PORT}"]),
        "observability.http_host": '"0.0.0.0"',
        "observability.http_port": str(HTTP_PORT),
        **profile.overrides,
    }
    print(f"node-{number}: {profile.label}", file=sys.stderr, flush=True)
    overrides = [part for key, value in settings.items() for part in (f"--{key}", value)]
    return ["swarm", "join", str(manifest), *overrides, *arguments]


def status(arguments: list[str]) -> list[str]:
    """Command line that tells whether this container's node is contributing."""
    return ["swarm", "status", str(own_folder()), *arguments]


def own_folder() -> Path:
    """Of this container's node."""
    numbers = own_numbers(DATA, socket.gethostname())
    if not numbers:
        sys.exit("a container must have run a node to tell of it, got none yet; look at its log")
    return DATA / f"node-{numbers[0]}"


def claim_folder(data: Path, container: str, numbered: int | None) -> tuple[int, int]:
    """(number of a folder that no other container uses, descriptor of its lock): as before or as `numbered`, where that is free.

    Replicas of a service share one volume and one command line. What decides is a lock that the node inherits and that dies with
    it; in it stands whose it is, for a restart of this container and for `status`.
    """
    preferred = [*own_numbers(data, container), *([numbered] if numbered else [])]
    for number in (*preferred, *range(1, MAX_NODES + 1)):
        lock = os.open(data / f".node-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        os.ftruncate(lock, 0)
        os.pwrite(lock, container.encode(), 0)
        os.set_inheritable(lock, True)
        return number, lock
    sys.exit(f"a volume holds {MAX_NODES} nodes at most, got all of them in use; give this one another volume")


def own_numbers(data: Path, container: str) -> list[int]:
    """Of the folder that this container has, or had when it last ran; of none before its first start."""
    locks = [path for path in data.glob(".node-*.lock") if path.read_text(encoding="utf-8") == container]
    return [int(path.stem.rpartition("-")[2]) for path in locks]


def numbered_by_compose() -> int | None:
    """A container learns its number only from its name, PROJECT-SERVICE-NUMBER, and that only from Docker's DNS."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None  # its network is cut
    asked = ["getent", "-s", "dns", "hosts", address]  # gethostbyaddr would find the container's id in /etc/hosts
    told = re.search(r"[-_](\d+)\.", subprocess.run(asked, capture_output=True, text=True, check=False).stdout)
    return int(told[1]) if told else None


def healthy(port: str = str(HTTP_PORT)) -> bool:
    """Whether what this container runs answers. By hand: this runs every few seconds, and imports cost more than the question."""
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return connection.recv(64).split()[1:2] == [b"200"]
    except OSError:
        return False


def main() -> None:
    role, arguments = sys.argv[1], sys.argv[2:]
    if role == "healthy":
        sys.exit(not healthy(*arguments))
    if role == "folder":
        print(own_folder())
        return
    roles = {"bootstrap": bootstrap, "node": node, "status": status}
    command = roles[role](arguments) if role in roles else [role, *arguments]
    os.execvp(command[0], command)  # noqa: S606  (so that signals reach it)


if __name__ == "__main__":
    main()
