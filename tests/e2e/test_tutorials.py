"""The commands of the documentation, run as a newcomer would: in a fresh folder, one after the other.

A block that begins with `# leave this running` stays up until its page ends. An indented block whose first line is `# NAME.py`
or `# NAME.toml` is that file. ADDRESS stands for the address that a running command printed, REQUEST and INVITATION for what the
command before printed, MEMBER for a member's peer id. Ports are exchanged for free ones. Runs are cut to few small rounds: what
is tested is that the commands work in their order.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.swarm_process import SwarmProcess, swarm

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "getting-started.md",
    "rewards.md",
    "tutorials/testbed.md",
    "tutorials/public.md",
    "tutorials/silo.md",
    "tutorials/your-own-task.md",
]
KEEP_RUNNING = "# leave this running"
ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")
LENGTH = re.compile(r"(--rounds|--node\.max_rounds) (\d+)")
WARM_START = re.compile(r"^steps = \d+", re.MULTILINE)
MAX_ROUNDS = 2
MEETING_ROUNDS = 20
"""Of a node that joins: what follows on the page needs something that another node hands over meanwhile."""
SMALL = {"rollouts.groups_per_round": 4, "evaluation.tasks_per_source": 1}
"""Settings of the nodes of a page, where it does not set them itself."""
_COMMAND_S = 240


def blocks(page: str) -> list[list[str]]:
    """Lines of each block of commands."""
    return [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.S)]


def files(page: str) -> dict[str, str]:
    """{name: text} of the indented blocks whose first line is the name of a file."""
    first = r"    # (\w+\.(?:py|toml))\n"
    rest = rf"((?:(?!{first})(?:    .*\n|\n))+)"
    return {one[1]: textwrap.dedent(one[2]) for one in re.finditer(f"^{first}{rest}", (DOCS / page).read_text(), re.M)}


class Newcomer:
    """Types what the page says, in a folder of their own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._port = str(_free_port())
        self._address = ""
        self._said = ""
        self._environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def type(self, line: str) -> subprocess.CompletedProcess[str]:
        most = MEETING_ROUNDS if line.startswith("swarm join") else MAX_ROUNDS
        words = self._words(LENGTH.sub(lambda found: f"{found[1]} {min(int(found[2]), most)}", line))
        if words[0] == "swarm":
            ended = swarm(*words[1:], cwd=self._folder, timeout_s=_COMMAND_S, **self._environment)
        else:
            ended = subprocess.run(words, cwd=self._folder, capture_output=True, text=True, timeout=_COMMAND_S)
        self._said = ended.stdout.strip()
        return ended

    def leave_running(self, line: str) -> None:
        """Until the page ends; waits for the address that others join through."""
        output = self._folder / "running.out"
        environment = os.environ | self._environment
        running = SwarmProcess(*self._words(line)[1:], cwd=self._folder, environment=environment, output=output)
        self._stack.callback(_end, running)
        until = time.monotonic() + _COMMAND_S
        while not (found := ADDRESS.search(output.read_text() if output.exists() else "")):
            assert running.poll() is None and time.monotonic() < until, output.read_text()
            time.sleep(0.05)  # between two looks at another process's file
        self._address = found[0]

    def _words(self, line: str) -> list[str]:
        line = line.replace("28000", self._port)
        if re.match(r"swarm (run|testbed|join) (?!.*--(check|dry-run))", line):
            line += "".join(f" --{name} {value}" for name, value in SMALL.items() if name not in line)
        return [self._standing_for(word) for word in shlex.split(line, comments=True)]

    def _standing_for(self, word: str) -> str:
        if word == "ADDRESS":
            return self._address
        if word in ("REQUEST", "INVITATION"):
            return self._said.splitlines()[-1]
        if word == "MEMBER":
            listed = self.type("swarm silo members --dir runs/guest --json")
            own = self.type("swarm identity show --dir runs/guest --json")
            (guest,) = [
                one["peer_id"]
                for one in json.loads(listed.stdout)["members"]
                if one["peer_id"] == json.loads(own.stdout)["peer_id"]
            ]
            return guest
        return word


def _end(process: SwarmProcess) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(600)  # up to six processes that import torch, one after the other
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_work_in_their_order(page: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        newcomer = Newcomer(tmp_path, stack)
        for name, text in files(page).items():
            (tmp_path / name).write_text(WARM_START.sub(f"steps = {MAX_ROUNDS}", text))
        for block in blocks(page):
            if block[0] == KEEP_RUNNING:
                (line,) = block[1:]
                newcomer.leave_running(line)
                continue
            for line in block:
                ended = newcomer.type(line)
                assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"
        assert blocks(page), "a page without commands"
