"""What a person may ask of a running node: pause and resume training or sharing, a checkpoint, and a stop.

page, terminal ─▶ [NodeControls] ─┬─ compute thread: between two rounds, waits there while training is paused
                                  └─ SharingPause: the exchange publishes and pulls nothing while sharing is paused
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from swarm.sharing.totals import SharingPause

logger = logging.getLogger(__name__)

ACTIONS = ("pause-training", "resume-training", "pause-sharing", "resume-sharing", "checkpoint")


class NodeControls:
    """The requests to one node during one process; a restarted node trains and shares. Safe from any thread."""

    def __init__(self, sharing: SharingPause) -> None:
        self._sharing = sharing
        self._changed = threading.Condition()
        self._is_training_paused = False
        self._wants_checkpoint = False
        self._has_ended = False
        self._saved_round: int | None = None

    def act(self, action: str) -> None:
        """Do one of ACTIONS. Asking for what is so already changes nothing."""
        assert action in ACTIONS, action
        logger.info("asked from the page: %s", action.replace("-", " "))
        if action == "pause-sharing":
            self._sharing.pause()
        elif action == "resume-sharing":
            self._sharing.resume()
        with self._changed:
            if action == "checkpoint":
                self._wants_checkpoint = True
            elif action.endswith("training"):
                self._is_training_paused = action.startswith("pause")
            self._changed.notify_all()

    def end(self) -> None:
        """Ask the node to stop after the round in flight: nobody waits here any more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether a stop was asked for."""
        return self._has_ended

    def wait_for_end(self, timeout_s: float) -> None:
        """Return when a stop is asked for, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, timeout_s)

    def between_rounds(self, save: Callable[[Callable[[int], None]], None]) -> None:
        """Save where a checkpoint was asked for, and wait while training is paused. Called by the compute thread.

        `save` begins to write one, and calls what it is given with the round once that is on the disk, on any thread.
        """
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                wants, self._wants_checkpoint = self._wants_checkpoint and not self._has_ended, False
                if not wants:
                    return
            save(self._note_saved)

    def phase(self, phase: str) -> str:
        """The phase as the status file and the page show it: for a node that learns, also what is paused."""
        if phase != "learning":
            return phase
        paused = (self._is_training_paused, self._sharing.is_paused)
        return {(True, True): "paused", (True, False): "training paused", (False, True): "sharing paused"}.get(
            paused, phase
        )

    def state(self) -> dict[str, Any]:
        """The requests that hold at this moment, for the page."""
        with self._changed:
            return {
                "training_paused": self._is_training_paused,
                "sharing_paused": self._sharing.is_paused,
                "checkpoint_wanted": self._wants_checkpoint,
                "saved_round": self._saved_round,
            }

    def _note_saved(self, round: int) -> None:
        with self._changed:
            self._saved_round = round

    def _has_news(self) -> bool:
        return self._has_ended or self._wants_checkpoint or not self._is_training_paused
