"""Values as a page may show them: finite numbers, and text in which nothing hides, colours or turns around."""

import math
from collections.abc import Mapping
from typing import Any

from swarm.observability.plain_text import plain

MAX_CHARS = 4000
_MAX_DEPTH = 8


def shown(value: Any, depth: int = 0) -> Any:
    """`value` for strict JSON: NaN and infinity become None, text is made plain and cut; whatever else there is, its type."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return shown_text(value, MAX_CHARS)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {shown_text(str(key), 200): shown(entry, depth + 1) for key, entry in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [shown(entry, depth + 1) for entry in value]
    return type(value).__name__


def shown_text(text: str, max_chars: int) -> str:
    """At most so many characters of it, line ends and tabs kept, other control and invisible characters written out."""
    cut = plain(text[:max_chars], keep="\n\t")
    return f"{cut} … ({len(text)} characters)" if len(text) > max_chars else cut
