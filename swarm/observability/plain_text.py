"""Text for people: makes text of peers safe for a terminal or a log, and formats durations, sizes and counts.

Characters that would move a cursor, colour, hide or forge text are escaped.
"""

_STEPS = ((86400, "d"), (3600, "h"), (60, "min"))


def for_how_long(seconds: float) -> str:
    """Such as `42 s`, `7 min`, `3 h` or `2 d`: the largest unit of which there are one and a half."""
    for length, unit in _STEPS:
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def counted(count: int, noun: str) -> str:
    """Such as `1 peer` or `3 peers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def none_answers(num_known: int) -> str:
    """That none of so many known peers answers."""
    return "the only known peer does not answer" if num_known == 1 else f"none of {num_known} known peers answers"


def size(num_bytes: float) -> str:
    """Such as `812 KiB` or `1.4 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def plain(text: str, keep: str = "") -> str:
    """`text` with every control, escape and invisible character but those in `keep` as its escape, such as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)
