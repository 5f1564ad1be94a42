"""Text of strangers for a terminal or a log: characters that would move a cursor, colour, hide or forge are written out."""


def plain(text: str, keep: str = "") -> str:
    """`text` with every control, escape and invisible character but those in `keep` as its escape, such as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)
