"""Stops a process on SIGINT and SIGTERM, and kills it if it does not stop in time, whatever its threads do.

    signal ─┬─ Python's handler ─▶ event loop ─▶ on_signal()
            └─ a handler in C ─▶ pipe ─▶ helper process ── still running DEADLINE_S later ──▶ SIGKILL

Python's handler needs the interpreter's lock, which native code may hold forever. The handler in C is that of
faulthandler: it needs no lock, writes into the pipe and then calls Python's. The helper is a Python process of 8 MiB
that imports nothing of this package.
"""

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

DEADLINE_S = 20.0
"""Time from the first signal to the kill. A node needs a few seconds to stop."""
_IMPATIENT_S = 4.0
"""Time from the second signal to the kill. The process itself, if it can, ends at once; a busy machine delays that."""
_HELPER = """
import os, select, sys, time
process, deadline_s, impatient_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
received, end = b"", None
while end is None or time.monotonic() < end:
    if select.select([0], [], [], None if end is None else max(0.0, end - time.monotonic()))[0]:
        data = os.read(0, 65536)
        if not data:
            os._exit(0)
        received = (received + data)[-65536:]
        is_second = received.count(b"(most recent call first)") > 1
        now = time.monotonic()
        end = min(end or now + deadline_s, now + (impatient_s if is_second else deadline_s))
if os.getppid() == process:
    os.write(2, b"swarm: the process did not stop in time after a signal and was killed; something holds its interpreter\\n")
    os.kill(process, 9)
"""


def obey_stop_signals(on_signal: Callable[[], None], deadline_s: float = DEADLINE_S) -> None:
    """Call `on_signal` on the running event loop at each SIGINT and SIGTERM, and make sure that the process ends.

    A process that still runs `deadline_s` after the first signal is killed, and so is one that still runs four
    seconds after the second signal. This holds until the process ends, also while its loop closes and waits for threads. Call
    it once, on the main thread. Raises OSError where the helper cannot be started.
    """
    import asyncio  # here, as commands without a loop import this module, too

    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # a handler must never wait
    arguments = ["-I", "-S", "-c", _HELPER, str(os.getpid()), str(deadline_s), str(_IMPATIENT_S)]
    os.posix_spawn(  # it ends with the pipe, which ends with this process: nobody waits for it
        sys.executable,
        [sys.executable, *arguments],
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)],
        setsid=True,  # a Ctrl-C on the terminal must not end the helper
    )
    os.close(reader)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
        faulthandler.register(number, writer, all_threads=False, chain=True)  # then it calls the previous handler


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does. On the main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
