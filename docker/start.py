#!/usr/bin/env python
"""What a container of docker-compose.yml runs: `bootstrap`, `node`, or any command line. `status` and `folder` tell of its node.

    bootstrap: founds the swarm once, and serves it ─▶ /swarm/NAME.swarm.toml ─▶ node: joins with it, as anyone would
    SWARM_MANIFEST: the swarm is another one ─▶ bootstrap serves that one, too; node: joins with that

Nodes of a scaled service differ as those of `swarm testbed` do, by their number, and each claims a folder of its own in /data,
so that what comes back, the same container or another in its place, goes on as who was there.

Compose restarts a service that ends with any code but 0 (`restart: on-failure`). A code that another start does not change,
such as that of a misspelt setting, is told and becomes 0 here.
"""

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType

NAME = "compose"
DATA, SHARED = Path("/data"), Path("/swarm")
OWN_MANIFEST = SHARED / f"{NAME}.swarm.toml"
INDEX_PORT, GOSSIP_PORT, HTTP_PORT = 38000, 38001, 9100
MAX_NODES = 1000
PASSPHRASE = Path("/run/secrets/passphrase")
NAME_OF_MANIFEST, FOUNDER, ARGUMENTS = "SWARM_MANIFEST", "SWARM_FOUNDER", "SWARM_ARGUMENTS"
"""Variables of docker-compose.yml that are no settings: manifest of another swarm, its founder, more words for `swarm join`."""
INTERRUPTED, BY_SIGNAL = 130, 128


def bootstrap(arguments: list[str]) -> list[str]:
    """Command line of the peer that others join through; founds the swarm where there is none and none is named."""
    folder, host = DATA / "bootstrap", f"/dns4/{socket.gethostname()}"
    peer_id = identity_in(folder)
    if not os.environ.get(NAME_OF_MANIFEST) and not OWN_MANIFEST.exists():
        address = f"{host}/tcp/{INDEX_PORT}/p2p/{peer_id}"
        create = ["swarm", "create", NAME, "--key", str(DATA / "founder.key"), "--bootstrap", address, "--any-base"]
        if code := subprocess.run(create, cwd=SHARED, check=False).returncode:
            sys.exit(ending(code))
    return bootstrap_command(folder, manifest(), host, [*founder(), *arguments])


def identity_in(folder: Path) -> str:
    """Peer id of the identity in `folder`, which is made where there is none, and encrypted where there is a passphrase."""
    from swarm.cli.swarm.passphrase import FILE_VARIABLE, unlock
    from swarm.machine.node_folder import NodeFolder
    from swarm.records import identity

    files = NodeFolder(folder)
    files.create()
    peer_id = identity.load_or_create(files.identity, unlock).peer_id
    if os.environ.get(FILE_VARIABLE) and not identity.is_encrypted(files.identity):
        subprocess.run(["swarm", "identity", "lock", "--dir", str(folder)], check=True)  # noqa: S607
    return peer_id


def manifest() -> str:
    """File or address of the manifest of the swarm that this container takes part in."""
    return os.environ.get(NAME_OF_MANIFEST) or str(OWN_MANIFEST)


def founder() -> list[str]:
    """The option that accepts the manifest of this founder alone."""
    peer_id = os.environ.get(FOUNDER)
    return ["--founder", peer_id] if peer_id else []


def bootstrap_command(path: Path, manifest: str, host: str, arguments: list[str]) -> list[str]:
    return [
        "swarm", "bootstrap", "--manifest", manifest, "--dir", str(path),
        "--listen", f"/ip4/0.0.0.0/tcp/{INDEX_PORT}", "--announce", f"{host}/tcp/{INDEX_PORT}",
        "--gossip-listen", f"/ip4/0.0.0.0/tcp/{GOSSIP_PORT}", "--gossip-announce", f"{host}/tcp/{GOSSIP_PORT}",
        "--http-host", "0.0.0.0", "--http-port", str(HTTP_PORT), *arguments,
    ]  # fmt: skip


def node(arguments: list[str]) -> list[str]:
    """Command line of this container's node."""
    number, _ = claim_folder(DATA, socket.gethostname(), numbered_by_compose())
    identity_in(DATA / f"node-{number}")
    more = [*founder(), *arguments, *shlex.split(os.environ.get(ARGUMENTS, ""))]
    return node_command(number, DATA, manifest(), more)


def node_command(
    number: int, data: Path, manifest: str, arguments: list[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Of node `number`; `arguments` and settings in `environment` win over its profile.

    Nodes of a real base, or of another swarm, are all alike: profiles are for comparing the bundled policy with itself.
    """
    from swarm.config import setting_variables
    from swarm.testbeds.profiles import PROFILES

    given = setting_variables(environment)
    is_demo = not environment.get(NAME_OF_MANIFEST) and given.get("policy.base", "bundled").startswith("bundled")
    profile = PROFILES[(number - 1) % len(PROFILES) if is_demo else 0]
    settings = {
        "node.dir": json.dumps(str(data / f"node-{number}")),
        "network.listen": json.dumps([f"/ip4/0.0.0.0/tcp/{INDEX_PORT}"]),
        "observability.http_host": '"0.0.0.0"',
        "observability.http_port": str(HTTP_PORT),
        **{key: value for key, value in profile.overrides.items() if key not in given},
    }
    print(f"node-{number}: {profile.label}", file=sys.stderr, flush=True)
    overrides = [part for key, value in settings.items() for part in (f"--{key}", value)]
    return ["swarm", "join", manifest, *overrides, *arguments]


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


def serve(command: Sequence[str]) -> int:
    """Run a service until its end, pass signals on, and return what compose is to make of it."""
    child: subprocess.Popen[bytes] | None = None
    is_stopping = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True
        if child is not None:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    child = subprocess.Popen(command, close_fds=False)  # it inherits the lock of its folder
    if is_stopping:  # before there was anybody to pass it on to
        child.send_signal(signal.SIGTERM)
    code = child.wait()
    return ending(code, is_stopping=is_stopping)


def ending(code: int, *, is_stopping: bool = False) -> int:
    """The exit code of the container of a service that ended with `code`: 0 where compose must not start it again."""
    from swarm.errors import NEEDS_A_PERSON

    if code in NEEDS_A_PERSON:
        print(f"ended with code {code}, which another start does not change: not started again", file=sys.stderr)
    if code == INTERRUPTED or is_stopping or code in NEEDS_A_PERSON:
        return 0
    return code if code >= 0 else BY_SIGNAL - code


def name_passphrase(environment: MutableMapping[str, str]) -> None:
    """The secret of docker-compose.yml, if it is not the empty file that stands for none."""
    if PASSPHRASE.is_file() and PASSPHRASE.stat().st_size:
        environment.setdefault("SWARM_PASSPHRASE_FILE", str(PASSPHRASE))


def main() -> None:
    role, arguments = sys.argv[1], sys.argv[2:]
    if role == "healthy":
        sys.exit(not healthy(*arguments))
    if role == "folder":
        print(own_folder())
        return
    if role == "serve":
        sys.exit(serve(arguments))
    name_passphrase(os.environ)
    services = {"bootstrap": bootstrap, "node": node, "dashboard": lambda words: ["swarm", "dashboard", *words]}
    if role in services:  # what watches over it anew, without all that was imported to find out its command line
        command = [sys.executable, __file__, "serve", *command_of(services[role], arguments)]
    else:
        command = status(arguments) if role == "status" else [role, *arguments]
    os.execvp(command[0], command)  # noqa: S606  (so that signals reach it)


def command_of(service: Callable[[list[str]], list[str]], arguments: list[str]) -> list[str]:
    """Ends the container with one line where settings are wrong."""
    from swarm.errors import SwarmError

    try:
        return service(arguments)
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ending(error.exit_code))


if __name__ == "__main__":
    main()
