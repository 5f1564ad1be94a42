"""SQLite store of admitted groups; survives `kill -9` of the node at any instant.

    admission (network loop) → add → [pool] → draw → training batch (compute thread)

One connection behind a lock serves both threads: calls take well under a millisecond. Groups are stored in the wire format,
so a pool written by an older version is either read or dropped row by row, never trusted blindly.
"""

import logging
import random
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.config import SharingSection
from swarm.records.codec import decode_body, encode_body
from swarm.records.rejection import InvalidRecord
from swarm.types import Lineage, RolloutGroup

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS bodies (hash BLOB PRIMARY KEY, expires_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, author TEXT NOT NULL, policy TEXT NOT NULL, tokenizer TEXT NOT NULL,
    policy_version INTEGER NOT NULL, created_at REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0, payload BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS groups_by_age ON groups (created_at);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


class ExperiencePool:
    """Groups of other nodes, newest `config.pool_max_groups` of them, each drawn at most `config.max_uses` times."""

    def __init__(self, path: Path | str, config: SharingSection, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._db = _open(Path(path)) if path != ":memory:" else _connect(":memory:")

    def add(self, body_hash: bytes, expires_at: float, created_at: float, groups: Sequence[RolloutGroup]) -> int:
        """Store the groups of one admitted body. Returns how many were new: a known body adds nothing."""
        with self._lock, self._db:
            try:
                self._db.execute("INSERT INTO bodies VALUES (?, ?)", (body_hash, expires_at))
            except sqlite3.IntegrityError:
                return 0
            self._db.executemany(
                "INSERT INTO groups (author, policy, tokenizer, policy_version, created_at, payload) VALUES (?,?,?,?,?,?)",
                [
                    (g.author, g.lineage.policy, g.lineage.tokenizer, g.policy_version, created_at, encode_body([g]))
                    for g in groups
                ],
            )
            self._prune()
        return len(groups)

    def knows_body(self, body_hash: bytes) -> bool:
        with self._lock:
            return self._db.execute("SELECT 1 FROM bodies WHERE hash = ?", (body_hash,)).fetchone() is not None

    def num_fresh(self) -> int:
        """Groups that may still be drawn."""
        with self._lock:
            (count,) = self._db.execute(
                "SELECT count(*) FROM groups WHERE uses < ? AND created_at > ?", self._fresh_bounds()
            ).fetchone()
        return count

    def draw(self, count: int, rng: random.Random) -> list[RolloutGroup]:
        """Up to `count` fresh groups, uniformly, and marks them used.

        At most `max_share_per_peer` of them by one author while other authors have groups left.
        """
        if count == 0:
            return []
        with self._lock, self._db:
            rows = self._db.execute(
                "SELECT id, author FROM groups WHERE uses < ? AND created_at > ? ORDER BY id", self._fresh_bounds()
            ).fetchall()
            chosen = _choose(rows, count, self._config.max_share_per_peer, rng)
            groups = [self._read(group_id) for group_id in chosen]
            self._db.executemany("UPDATE groups SET uses = uses + 1 WHERE id = ?", [(i,) for i in chosen])
        return [group for group in groups if group is not None]

    def next_number(self, name: str) -> int:
        """A counter that never gives a number twice, across restarts too."""
        with self._lock, self._db:
            (value,) = self._db.execute(
                "INSERT INTO counters VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value",
                (name,),
            ).fetchone()
        return value - 1

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _fresh_bounds(self) -> tuple[int, float]:
        return self._config.max_uses, self._clock() - self._config.max_age_s

    def _read(self, group_id: int) -> RolloutGroup | None:
        author, policy, tokenizer, version, payload = self._db.execute(
            "SELECT author, policy, tokenizer, policy_version, payload FROM groups WHERE id = ?", (group_id,)
        ).fetchone()
        try:
            return decode_body(payload, author, Lineage(policy, tokenizer), version)[0]
        except InvalidRecord as error:
            logger.warning("dropped a damaged group from the pool: %s", error)
            return None

    def _prune(self) -> None:
        max_uses, oldest = self._fresh_bounds()
        self._db.execute("DELETE FROM groups WHERE uses >= ? OR created_at <= ?", (max_uses, oldest))
        self._db.execute(
            "DELETE FROM groups WHERE id <= (SELECT id FROM groups ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (self._config.pool_max_groups,),
        )
        self._db.execute("DELETE FROM bodies WHERE expires_at < ?", (self._clock(),))


def _choose(rows: list[tuple[int, str]], count: int, max_share: float, rng: random.Random) -> list[int]:
    """Ids in random order: first within the share per author, then, if too few, whatever is left."""
    shuffled = rng.sample(rows, len(rows))
    limit = max(1, int(max_share * count))
    taken: dict[str, int] = {}
    first: list[int] = []
    rest: list[int] = []
    for group_id, author in shuffled:
        within = taken.get(author, 0) < limit
        taken[author] = taken.get(author, 0) + within
        (first if within else rest).append(group_id)
    return (first + rest)[:count]


def _open(path: Path) -> sqlite3.Connection:
    """Open, or move a damaged file aside and start an empty pool: a pool is a cache, the node must go on."""
    try:
        return _connect(str(path))
    except sqlite3.DatabaseError as error:
        aside = path.with_name(path.name + ".damaged")
        path.replace(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        logger.warning("the experience pool was damaged (%s) and is now %s; starting with an empty one", error, aside)
        return _connect(str(path))


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_SCHEMA)
        if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check failed")
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db
