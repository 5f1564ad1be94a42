"""Repeats one step of a node until it is cancelled, and survives failures of disk and network."""

import asyncio
import logging
import math
import sqlite3
from collections.abc import Awaitable, Callable
from typing import NoReturn

from swarm.errors import SwarmError

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 1.0
SAY_AGAIN_S = 600.0


async def repeat(
    step: Callable[[], Awaitable[None]], what: str, *, pause_s: float = 0.0, on_failure: Callable[[], None]
) -> NoReturn:
    """Run `step` until cancelled. An error of disk or network is logged, counted by `on_failure`, and the step is tried again.

    `what`: what the step does, in words that follow "cannot", such as "publish the groups of a round". Any other error is a
    bug and ends the work. A step that goes on failing is logged every SAY_AGAIN_S.
    """
    clock, silent_until = asyncio.get_running_loop().time, -math.inf
    while True:
        try:
            await step()
            silent_until = -math.inf
        except (OSError, sqlite3.Error, SwarmError) as error:
            on_failure()
            if clock() >= silent_until:
                silent_until = clock() + SAY_AGAIN_S
                logger.warning("cannot %s, and tries again: %s", what, error)
            await asyncio.sleep(_RETRY_PAUSE_S)
        await asyncio.sleep(pause_s)
