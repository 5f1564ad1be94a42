"""How long finding a partner and exchanging adapters may take."""

from dataclasses import dataclass


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
