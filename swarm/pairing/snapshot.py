"""What goes into an exchange and what comes out of it.

Snapshot (own) ─→ MergeExchange ─→ Partner (with the snapshot of the other) or Alone (with the reason)
"""

from dataclasses import dataclass, field

from swarm.records.adapter_offer import MAX_ADAPTER_BYTES, MAX_PRECISION_CHARS


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An adapter as bytes, at the end of its inner steps."""

    lineage: str
    """32 hex digits: `Lineage.policy`."""
    precision: str
    """How the numbers are written, such as `bf16`; at most 16 characters."""
    outer_round: int
    policy_version: int
    payload: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be offered."""
        if not 0 < len(self.payload) <= MAX_ADAPTER_BYTES:
            raise ValueError(f"an adapter must have 1 to {MAX_ADAPTER_BYTES} bytes, got {len(self.payload)}")
        if len(self.precision) > MAX_PRECISION_CHARS:
            raise ValueError(f"a precision must have at most {MAX_PRECISION_CHARS} characters, got {self.precision!r}")


@dataclass(frozen=True, slots=True)
class Partner:
    """The adapter of one other node. Its bytes are those that the node signed for; nothing is said of their worth."""

    peer_id: str
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Alone:
    """No adapter of another node this time: a solo step."""

    reason: str
    """nobody: none was ready. declined: none of those took this node. replaced: a newer snapshot was offered.
    stopped: the exchange does not run. Else why the transfer failed, a word of `errors.RequestFailure`."""


Outcome = Partner | Alone


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an exchange may take."""

    search_s: float = 30.0
    """For a partner. Longer finds more of them where nodes take different times for their inner steps."""
    request_timeout_s: float = 10.0
    """For one small request; a piece of an adapter gets more, by its size."""
    min_bytes_per_s: float = 131_072.0
    """A partner whose adapter comes in more slowly than this (one megabit) is left."""

    def transfer_s(self, num_bytes: int) -> float:
        """Longest time that fetching an adapter takes."""
        return self.request_timeout_s + num_bytes / self.min_bytes_per_s

    def total_s(self, num_bytes: int) -> float:
        """Longest time from an offer to its outcome, where the index answers in time."""
        # A proposal that is under way when the search ends may take two tries.
        return self.search_s + 2 * self.request_timeout_s + self.transfer_s(num_bytes)
