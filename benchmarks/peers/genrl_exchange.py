"""One node of genrl: `HivemindBackend.all_gather_object`, run by the Python of genrl's own environment.

Commands and replies as in `measuring/command_loop.py` (which is imported from there by path). With "sleep": false the
name `time` inside genrl's module is replaced by one whose `sleep` returns at once; nothing else is changed.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measuring.command_loop import reply, take_over_stdin, take_over_stdout


class GenrlNode:
    """Bootstrap peer where no initial peers are given."""

    def __init__(self, module: ModuleType, initial_peers: list[str], num_nodes: int, gather_timeout_s: int) -> None:
        os.environ["HIVEMIND_WORLD_SIZE"] = str(num_nodes)
        self._module = module
        module.HivemindRendezvouz.init(is_master=not initial_peers)
        self._backend = module.HivemindBackend(
            initial_peers=initial_peers or None, timeout=gather_timeout_s, beam_size=10
        )
        self._value = b""
        self._num_bodies = 0

    def addresses(self) -> list[str]:
        return [str(address) for address in self._backend.dht.get_visible_maddrs(latest=True)]

    def prepare(self, *, body_bytes: int, num_bodies: int, sleep: bool, **_: Any) -> dict[str, Any]:
        self._value = os.urandom(body_bytes)
        self._num_bodies = num_bodies
        self._module.time = time if sleep else SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
        return {}

    def go(self, *, start_at: float, **_: Any) -> dict[str, Any]:
        time.sleep(max(0.0, start_at - time.monotonic()))
        gathered = self._backend.all_gather_object(self._value)
        seconds = time.monotonic() - start_at
        others = [value for value in gathered.values() if len(value) == len(self._value)]
        return {"seconds": seconds if len(others) - 1 >= self._num_bodies else None}


def _read_commands(stream: TextIO, commands: "queue.Queue[dict[str, Any]]") -> None:
    for line in stream:
        commands.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)  # the parent is gone, or done; a hanging call would never notice


def genrl_backend() -> ModuleType:
    """Imports torch too, which takes seconds."""
    import hivemind
    from hivemind.utils import get_dht_time

    hivemind.get_dht_time = get_dht_time  # hivemind 1.1.12 no longer exports what genrl imports from there
    from genrl.communication.hivemind import hivemind_backend

    return hivemind_backend


def main() -> None:
    replies, stream = take_over_stdout(), take_over_stdin()
    module = genrl_backend()  # all nodes at once, before the first of them is asked to start
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_commands, args=(stream, commands), daemon=True).start()
    node: GenrlNode | None = None
    while True:
        command = commands.get()
        name = command.pop("do")
        try:
            if name == "start":
                node = GenrlNode(module, command["initial_peers"], command["num_nodes"], command["gather_timeout_s"])
                reply(replies, {"addresses": node.addresses()})
            elif name in ("finish", "clear"):
                reply(replies, {})
            else:
                reply(replies, {"prepare": node.prepare, "go": node.go}[name](**command))
        except Exception as error:  # whatever breaks in there is a result: this round was not completed
            reply(replies, {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
