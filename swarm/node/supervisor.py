"""Starts a node again when it has crashed, for a laptop or a container without systemd.

supervisor ─ starts ─▶ node ─ ends ─┬─ 0, 130: done, or asked to stop ───▶ ends with it
   ▲                                ├─ a code that a person must fix ─────▶ ends with it
   └── a growing pause ◀────────────┴─ crash, signal, stuck ── too often in a row ─▶ gives up with its code
"""

import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from swarm.errors import NEEDS_A_PERSON
from swarm.machine import tethered
from swarm.observability.plain_text import for_how_long

_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class BackOff:
    """Pauses between a crash and the next start: the first one doubles with each crash in a row, with jitter."""

    first_s: float = 2.0
    longest_s: float = 300.0
    max_in_a_row: int = 10
    """Crashes in a row after which the node is not started again."""
    sound_after_s: float = 900.0
    """The crash of a node that ran this long counts as a first one."""


class Supervisor:
    """Supervises one command. To be run on the main thread, which receives signals.

    The node has its own session, so that Ctrl-C reaches it only once, through the supervisor. It dies with this process, however
    that ends.
    """

    def __init__(
        self, command: Sequence[str], back_off: BackOff, rng: random.Random, say: Callable[[str], None]
    ) -> None:
        """`command` begins with the path of an executable. `say`: a line for the terminal."""
        self._command = command
        self._back_off = back_off
        self._rng = rng
        self._say = say
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._wake_reader, self._wake_writer = os.pipe()

    def run(self, first_arguments: Sequence[str] = ()) -> int:
        """Run the node until it ends for good. Returns the exit code to end with: the node's, or 128 + n where signal n ended it.

        `first_arguments`: for the first start only.
        """
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
        before = {number: signal.signal(number, self._on_signal) for number in heeded}
        try:
            return self._run(first_arguments)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _run(self, first_arguments: Sequence[str]) -> int:
        num_crashes, arguments = 0, first_arguments
        while True:
            started_at = time.monotonic()
            code = self._run_once(arguments)
            arguments = ()
            if self._is_stopping or code in (0, _INTERRUPTED):
                return code
            if code in NEEDS_A_PERSON:
                self._say(f"the node ended with code {code}, which another start does not fix")
                return code
            num_crashes = 1 if time.monotonic() - started_at >= self._back_off.sound_after_s else num_crashes + 1
            if num_crashes >= self._back_off.max_in_a_row:
                self._say(f"the node ended with code {code} for the {num_crashes}th time in a row: giving up")
                return code
            pause_s = self._pause_s(num_crashes)
            self._say(
                f"the node ended with code {code}; it is started again in {for_how_long(pause_s)} "
                f"({num_crashes} of {self._back_off.max_in_a_row - 1})"
            )
            select.select([self._wake_reader], [], [], pause_s)
            if self._is_stopping:
                return _INTERRUPTED

    def _run_once(self, arguments: Sequence[str]) -> int:
        command = tethered.command(os.getpid(), [*self._command, *arguments])
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        if self._is_stopping:  # a signal that came before there was anybody to pass it to
            self._child.send_signal(signal.SIGTERM)
        code = self._child.wait()
        self._child = None
        return code if code >= 0 else 128 - code

    def _pause_s(self, num_crashes: int) -> float:
        longest_s = min(self._back_off.first_s * 2.0 ** (num_crashes - 1), self._back_off.longest_s)
        return longest_s * self._rng.uniform(0.5, 1.0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the node. A closed terminal also asks for a stop."""
        self._is_stopping = True
        os.write(self._wake_writer, b".")
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
