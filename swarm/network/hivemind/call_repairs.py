"""Two things that hivemind 1.1.12 leaves behind when a call over the daemon's connection is cancelled.

It goes by hivemind's names alone and imports nothing of it.
"""

import asyncio
from typing import Any
from uuid import UUID


class OpenCalls(dict[UUID, asyncio.Future[Any]]):
    """Calls that wait for an answer; one that was cancelled waits no more.

    hivemind sets the result of any call that is in its table. Where an answer comes in between the cancellation and the
    caller's clearing up, that raises in the task which reads the connection, and every later call of the process hangs.
    """

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)  # type: ignore[call-overload]
        return call is not None and not call.done()


def install(control: Any) -> None:
    """Into hivemind's client of the daemon, once."""
    control._pending_calls = OpenCalls(control._pending_calls)


def forget_when_cancelled(control: Any) -> None:
    """To be called by a handler: hivemind keeps the task of a call for ever that its caller cancelled."""

    def forget(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            for call_id in [call_id for call_id, known in control._handler_tasks.items() if known is task]:
                del control._handler_tasks[call_id]

    task = asyncio.current_task()
    assert task is not None, "handlers run in tasks"
    task.add_done_callback(forget)
