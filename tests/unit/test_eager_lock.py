"""The lock in place of py-libp2p's: no switch of tasks while it is free, and none given to a task that is cancelled."""

import math

import trio

from swarm.network.libp2p.inbound_limits import EagerLock


def test_a_free_lock_is_taken_without_a_switch_of_tasks() -> None:
    order: list[str] = []

    async def other() -> None:
        order.append("other")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            async with EagerLock():
                order.append("holder")

    trio.run(main)
    assert order == ["holder", "other"]


def test_a_cancelled_task_does_not_get_it() -> None:
    """It would encrypt a message and not send it, and the other side could decrypt none of the later ones."""
    lock, entered = EagerLock(), list[str]()

    async def main() -> None:
        with trio.move_on_at(-math.inf) as scope:
            async with lock:
                entered.append("cancelled")
        assert scope.cancelled_caught
        async with lock:
            entered.append("next")

    trio.run(main)
    assert entered == ["next"]
