"""What a person may ask of a running node: pause and resume its two sides, and a checkpoint. Safe from any thread.

page, terminal ─▶ [NodeControls] ─┬─ compute thread: between two rounds, waits there while training is paused
                                  └─ exchange: publishes and pulls nothing while sharing is paused
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

ACTIONS = ("pause-training", "resume-training", "pause-sharing", "resume-sharing", "checkpoint")


class NodeControls:
    """Of one run of one node. Nothing of it outlives the process: a restarted node trains and shares."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_training_paused = False
        self._is_sharing_paused = False
        self._wants_checkpoint = False
        self._has_ended = False
        self._saved_round: int | None = None
        self.on_sharing: Callable[[bool], None] = lambda is_paused: None
        """Told, by whichever thread asks, when sharing is to pause or go on."""

    def sharing_is_paused(self) -> bool:
        return self._is_sharing_paused

    def act(self, action: str) -> None:
        """One of ACTIONS; asking for what is so already changes nothing."""
        assert action in ACTIONS, action
        logger.info("asked from the page: %s", action.replace("-", " "))
        with self._changed:
            if action == "checkpoint":
                self._wants_checkpoint = True
            elif action.endswith("training"):
                self._is_training_paused = action.startswith("pause")
            else:
                self._is_sharing_paused = action.startswith("pause")
            self._changed.notify_all()
        if action.endswith("sharing"):
            self.on_sharing(self._is_sharing_paused)

    def end(self) -> None:
        """The node is to stop: nobody waits here any more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def between_rounds(self, save: Callable[[], int | None]) -> None:
        """Called by the compute thread: saves where that was asked for, and waits, without looking again and again, while
        training is paused. `save` returns the round that it saved, None where that failed."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                wants, self._wants_checkpoint = self._wants_checkpoint and not self._has_ended, False
                if not wants:
                    return
            saved = save()
            self._saved_round = self._saved_round if saved is None else saved

    def phase(self, phase: str) -> str:
        """As the status file and the page tell it: of a node that learns, also what is paused."""
        if phase != "learning":
            return phase
        paused = (self._is_training_paused, self._is_sharing_paused)
        return {(True, True): "paused", (True, False): "training paused", (False, True): "sharing paused"}.get(
            paused, phase
        )

    def state(self) -> dict[str, Any]:
        """For the page."""
        with self._changed:
            return {
                "training_paused": self._is_training_paused,
                "sharing_paused": self._is_sharing_paused,
                "checkpoint_wanted": self._wants_checkpoint,
                "saved_round": self._saved_round,
            }

    def _has_news(self) -> bool:
        return self._has_ended or self._wants_checkpoint or not self._is_training_paused
