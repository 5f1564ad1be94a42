"""What the index takes: limits that every transport enforces, when storing and when reading."""

MAX_VALUE_BYTES = 1024 + 192
"""A signed record; in a silo sealed, with its key. Over 4 MiB under one key a replica cannot build its reply and readers ban
it: entries are small, bodies elsewhere."""
MAX_KEY_BYTES = 128
MAX_SUBKEY_BYTES = 128
MAX_ENTRIES_PER_KEY = 2048
"""2048 x (1216 + 128 + 128 + some) bytes stay under those 4 MiB."""
MAX_LIFETIME_S = 3600.0
"""Furthest expiration ahead; hivemind itself has no cap, and an entry that never expires could never be replaced."""
CLOCK_SKEW_S = 10.0
"""Clocks of honest nodes differ by less."""


def check_entry(key: str, subkey: str, value: bytes) -> None:
    """Raises ValueError for an entry that no node would take."""
    if not 0 < len(key.encode()) <= MAX_KEY_BYTES or "\0" in key:
        raise ValueError(f"an index key must have 1 to {MAX_KEY_BYTES} bytes and no NUL, got {key!r}")
    if not 0 < len(subkey.encode()) <= MAX_SUBKEY_BYTES:
        raise ValueError(f"an index subkey must have 1 to {MAX_SUBKEY_BYTES} bytes, got {subkey!r}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"an index value must be <= {MAX_VALUE_BYTES} bytes, got {len(value)}")


def is_live(expires_at: float, now: float) -> bool:
    """Whether an entry has not expired and does not claim too long a life. False for NaN."""
    return now < expires_at <= now + MAX_LIFETIME_S + CLOCK_SKEW_S
