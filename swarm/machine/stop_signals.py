"""Stops a process on SIGINT and SIGTERM, and ends it where it does not stop in time, whatever its threads do.

    signal ─┬─ Python's handler ─▶ event loop ─▶ on_signal()
            └─ a handler in C ─▶ pipe ─▶ helper process ── not ended DEADLINE_S later ──▶ SIGKILL

Python's handler needs the interpreter's lock, which native code may hold for ever. The handler in C is that of faulthandler: it
needs no lock, writes into the pipe and then calls Python's. The helper is a Python process of 8 MiB that imports nothing of ours.
"""

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Callable

DEADLINE_S = 20.0
"""From the first signal to the end. What a node does to stop takes a few seconds."""
_IMPATIENT_S = 1.0
"""From the second signal to the end. The process itself, if it can, ends at once then."""
_HELPER = """
import os, select, sys, time
process, deadline_s, impatient_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
told, end = b"", None
while end is None or time.monotonic() < end:
    if select.select([0], [], [], None if end is None else max(0.0, end - time.monotonic()))[0]:
        data = os.read(0, 65536)
        if not data:
            os._exit(0)
        told = (told + data)[-65536:]
        is_second = told.count(b"(most recent call first)") > 1
        now = time.monotonic()
        end = min(end or now + deadline_s, now + (impatient_s if is_second else deadline_s))
if os.getppid() == process:
    os.write(2, b"swarm: the process did not stop in time after a signal and was killed; something holds its interpreter\\n")
    os.kill(process, 9)
"""


def obey_stop_signals(on_signal: Callable[[], None], deadline_s: float = DEADLINE_S) -> None:
    """Call `on_signal` on the running event loop with each SIGINT and SIGTERM, and see to it that the process ends.

    A process that still runs `deadline_s` after the first signal is killed, and so is one that still runs a second after a second
    signal. This holds until the process ends, also while its loop closes and waits for threads. To be called once, on the main
    thread. Raises OSError where no helper can be started.
    """
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # a handler must never wait
    arguments = ["-I", "-S", "-c", _HELPER, str(os.getpid()), str(deadline_s), str(_IMPATIENT_S)]
    os.posix_spawn(  # it ends when the pipe does, which is with this process: nobody waits for it
        sys.executable,
        [sys.executable, *arguments],
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)],
        setsid=True,  # a Ctrl-C on the terminal is not for the helper
    )
    os.close(reader)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
        faulthandler.register(
            number, writer, all_threads=False, chain=True
        )  # it calls the handler that was there before
