"""What a merger needs from the code that connects replicas."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Protocol

from swarm.types import Appointment, MeetResult, Outcome, Seats, Snapshot

BoundOnStrangers = Callable[[Collection[str]], tuple[Collection[str], float]]
"""Says which of these peers are strangers, and the largest part of an adapter that all strangers together may have."""
Donate = Callable[[Snapshot], None]
"""Gives this adapter to newcomers from now on."""


class Pairer(Protocol):
    """Finds a partner for a snapshot: `MergeExchange` in a node, a `ReplicaPairer` in an experiment."""

    def offer(self, snapshot: Snapshot) -> "Future[Outcome]":
        """Look for a partner. Returns at once; the future never raises, and ends within a bounded time."""
        ...

    def report_unusable(self, peer_id: str) -> None:
        """Note that the adapter of this partner could not be used."""
        ...

    def is_known(self, peer_id: str) -> bool:
        """Whether this partner has proven itself by other work than adapters. From any thread."""
        ...


class FinalPairer(Protocol):
    """Brings nodes together that have ended their training: `FinalMeeting` in a node.

    Futures never raise, and end within a bounded time.
    """

    def gather(self, snapshot: Snapshot) -> "Future[Seats]":
        """Find out who takes part in the next final merge: this node alone where nobody else came."""
        ...

    def meet(self, appointment: Appointment) -> "Future[MeetResult]":
        """Do one exchange of adapters, after `gather`."""
        ...
