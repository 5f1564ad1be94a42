"""Node processes under the control of one parent: a line of JSON asks, a line of JSON answers.

A node reads commands from its standard input, writes one reply per command to its standard output, and ends when its
input ends: so none outlives a parent that was killed.
"""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

Reply = dict[str, Any]

_MAX_LINE_BYTES = 1 << 20
_END_GRACE_S = 5.0
_LOG_TAIL_CHARS = 600


class NodeFailed(Exception):
    """A node ended, broke or did not answer in time; its last words are in the message."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one node takes: its Python process and all children."""

    rss_mib: float
    """Resident set, summed over the processes: what the node would take on a machine of its own."""
    pss_mib: float
    """Proportional set: pages that processes of this machine share count in parts."""
    cpu_s: float
    """Processor time so far, user and system."""


class NodeProcess:
    """One node. Commands are answered one at a time."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def spawn(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> "NodeProcess":
        """`environment` is added to the own one; what the node prints to standard error goes to `log`."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
        return cls(process, log)

    async def ask(self, do: str, *, timeout_s: float, **arguments: Any) -> Reply:
        """Send one command and wait for its reply. Raises NodeFailed; a node that was late must not be asked again."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise NodeFailed(f"no answer to {do!r} within {timeout_s:.0f} s") from None
        if not line:
            raise NodeFailed(f"ended at {do!r}: {self._last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            raise NodeFailed(f"{do!r} failed: {reply['error']}")
        return reply

    def footprint(self) -> Footprint:
        memory = [one.memory_full_info() for one in self._family()]
        return Footprint(
            rss_mib=sum(m.rss for m in memory) / 2**20,
            pss_mib=sum(m.pss for m in memory) / 2**20,
            cpu_s=self.cpu_s(),
        )

    def cpu_s(self) -> float:
        """As in the footprint, but reading memory takes a hundred times as long."""
        return sum(self.cpu_s_by_part())

    def cpu_s_by_part(self) -> tuple[float, float]:
        """(of its Python process, of all its children)."""
        own, *children = (times.user + times.system for times in (one.cpu_times() for one in self._family()))
        return own, sum(children)

    async def end(self) -> None:
        """Close its input and wait; what is left of its process group after a grace is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # the group is this node's own: it leads a session
        except ProcessLookupError:
            pass
        await self._process.wait()

    def _family(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-_LOG_TAIL_CHARS:] or "no output"


async def all_of(work: Sequence[Awaitable[Reply]]) -> list[Reply]:
    """Replies of all nodes, in order. Raises the first NodeFailed, after every node has answered or failed."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
