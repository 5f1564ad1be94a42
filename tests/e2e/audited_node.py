"""`swarm` with a log of every address that Python connects to, looks up or sends to.

python -m tests.e2e.audited_node LOG ARGUMENT…
"""

import os
import sys

_EVENTS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}


def note_contacts(path: str) -> None:
    """Write every address from now on to the file `path`; this process cannot undo it."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(event: str, arguments: tuple) -> None:
        if event in _EVENTS:
            target = arguments[1] if event in ("socket.connect", "socket.sendto", "socket.sendmsg") else arguments[:2]
            os.write(log, f"{event} {target!r}\n".encode())

    sys.addaudithook(note)


def main() -> None:
    note_contacts(sys.argv[1])
    sys.argv = ["swarm", *sys.argv[2:]]
    from swarm.cli.main import main as swarm

    swarm()


if __name__ == "__main__":
    main()
