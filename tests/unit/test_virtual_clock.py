"""On the virtual loop waiting takes no time, order is by time, and a program that would hang says so."""

import asyncio
import threading
import time

import pytest

from swarm.network.memory.virtual_clock import EPOCH_S, Stalled, run, virtual_now


def test_hours_of_waiting_take_no_time_and_happen_in_order() -> None:
    events: list[tuple[float, str]] = []

    async def wait(name: str, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
        events.append((virtual_now() - EPOCH_S, name))

    async def main() -> None:
        await asyncio.gather(wait("c", 7200.0), wait("a", 0.5), wait("b", 60.0))

    started_at = time.monotonic()
    run(main())
    assert [(pytest.approx(when), name) for when, name in events] == [(0.5, "a"), (60.0, "b"), (7200.0, "c")]
    assert time.monotonic() - started_at < 1.0


def test_deadlines_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(30.0)


def test_work_for_a_thread_is_done_on_the_spot_and_takes_no_virtual_time() -> None:
    async def main() -> tuple[int, float]:
        thread = await asyncio.to_thread(threading.get_ident)
        return thread, asyncio.get_running_loop().time()

    assert run(main()) == (threading.get_ident(), 0.0)


def test_what_such_work_raises_comes_to_whoever_awaits_it() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run(main())


def test_a_program_that_would_hang_is_stalled() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stalled, match="nothing is scheduled"):
        run(main())
