"""The last merges of a node, as its rows of rounds tell them."""

from collections import deque
from collections.abc import Mapping
from typing import Any

MAX_MERGES = 50
_DETAILS = {
    "partner": "merge/partner",
    "share": "merge/partner_share",
    "clipped_share": "merge/clipped_share",
    "drift": "merge/drift",
    "lag_steps": "merge/lag_steps",
    "took_s": "merge/last_step_s",
}


class MergeLog:
    """Bounded. A merge is a row whose count of merges is higher than that of the row before."""

    def __init__(self) -> None:
        self._merges: deque[dict[str, Any]] = deque(maxlen=MAX_MERGES)
        self._num_seen: int | None = None

    def add(self, row: Mapping[str, Any], time_s: float) -> dict[str, Any] | None:
        """The merge of this round, if there was one."""
        count = row.get("merge/merges_total")
        if not isinstance(count, int):
            return None
        is_new = count > (self._num_seen or 0) and "merge/partner" in row
        self._num_seen = count
        if not is_new:
            return None
        merge = {"time_s": time_s, "round": row.get("round"), **{k: row.get(entry) for k, entry in _DETAILS.items()}}
        self._merges.append(merge)
        return merge

    def newest_first(self) -> list[dict[str, Any]]:
        return list(reversed(self._merges))
