"""The SQLite store of admitted groups. It survives `kill -9` of the node at any moment.

    admission (network loop) → add → [pool] → draw → training batch (compute thread)

One connection behind a lock serves both threads: it is held for SQL only, well under a millisecond; packing, unpacking and
choosing happen outside, so that neither thread waits for the other's work. Groups are stored in the wire format, so a pool
written by an older version is either read or dropped row by row, never trusted blindly.
"""

import contextlib
import logging
import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.config import SharingSection
from swarm.errors import ConfigError
from swarm.limits.weighted_sample import weighted_order
from swarm.machine.safe_files import open_to_read
from swarm.pool.success_levels import ANY_REWARD, SuccessLevel, has_success
from swarm.records.codec import decode_body, encode_body
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import Lineage, RolloutGroup

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS bodies (hash BLOB PRIMARY KEY, expires_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, author TEXT NOT NULL, policy TEXT NOT NULL, tokenizer TEXT NOT NULL,
    policy_version INTEGER NOT NULL, created_at REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0, payload BLOB NOT NULL,
    source TEXT NOT NULL DEFAULT '', mean_reward REAL NOT NULL DEFAULT 0.5);
CREATE INDEX IF NOT EXISTS groups_by_age ON groups (created_at);
CREATE TABLE IF NOT EXISTS newest_versions (
    author TEXT NOT NULL, policy TEXT NOT NULL, version INTEGER NOT NULL, seen_at REAL NOT NULL,
    PRIMARY KEY (author, policy)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
_LATER_COLUMNS = {"source": "TEXT NOT NULL DEFAULT ''", "mean_reward": "REAL NOT NULL DEFAULT 0.5"}
_AGED = """
CREATE TEMP VIEW aged AS SELECT *, coalesce((
    SELECT version FROM newest_versions n WHERE n.author = groups.author AND n.policy = groups.policy
), policy_version) - policy_version AS behind FROM groups
"""
"""Groups with the number of versions that they are behind their author's newest."""
_LARGEST_BEYOND = """
DELETE FROM groups WHERE id IN (
    SELECT id FROM (SELECT id, sum(length(payload)) OVER (ORDER BY id DESC) AS newer_bytes FROM groups)
    WHERE newer_bytes > ?)
"""
"""Deletes the oldest groups as far as they do not fit beside the newer ones."""
_ODD_COUNTER = "SELECT 1 FROM counters WHERE typeof(value) <> 'integer' OR value NOT BETWEEN 0 AND ?"
_MAX_COUNTER = 1 << 53
_BESIDE = ("-wal", "-shm", "-journal")
_NO_BOUND = 1 << 60
_MAX_PAYLOAD_BYTES = 128 << 20
"""Bound for all groups together: 256 KiB each where there are 512 of them. Groups of text take 2 to 10 KiB."""
_MAX_FILE_BYTES = 2 * _MAX_PAYLOAD_BYTES
"""Bound for the database file; SQLite reuses deleted space and refuses to grow beyond this."""


@dataclass(frozen=True, slots=True)
class PooledGroup:
    """What is known about a group before it is drawn."""

    author: str
    policy: str
    """Lineage of the policy that sampled the group."""
    source: str
    """Source of its task; empty where an older version stored the group."""
    mean_reward: float
    """As recomputed by this node at admission."""
    created_at: float


Weigh = Callable[[PooledGroup], float]
"""Expected usefulness of a group, >= 0; called by the thread that draws."""


class ExperiencePool:
    """The newest `config.pool_max_groups` groups of other nodes, each of which is drawn at most `config.max_uses` times.

    With `config.max_staleness` a group counts as too old once its author has announced that many versions more, by the author's
    own counter, since versions of two nodes cannot be compared. An author's versions are forgotten `max_age_s` after the newest
    one came in, so an author that starts again from version 0 is accepted then. Safe from any thread, but only one may draw.
    """

    def __init__(self, path: Path | str, config: SharingSection, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._db = _open(Path(path)) if path != ":memory:" else _connect(":memory:")
        self._dropped: Counter[str] = Counter()
        self._success_levels: Mapping[str, SuccessLevel] = {}

    def expect(self, levels: Mapping[str, SuccessLevel]) -> None:
        """From now on store only groups with a success, by the level of their source. `levels` must not be changed afterwards."""
        self._success_levels = levels

    def success_level(self, source: str) -> SuccessLevel:
        """What a group of this source must reach to count as a success. Safe from any thread."""
        return self._success_levels.get(source, ANY_REWARD)

    @property
    def dropped(self) -> Counter[str]:
        """Groups that were removed without being drawn, by reason:

        no_success, stale_version, too_old, overflow, too_large, banned_author.
        """
        with self._lock:
            return Counter(self._dropped)

    def add(self, body_hash: bytes, expires_at: float, created_at: float, groups: Sequence[RolloutGroup]) -> int:
        """Store the groups of one admitted body that hold a success. Returns how many; a body that is known adds nothing."""
        num_offered = len(groups)
        groups = [group for group in groups if has_success(group, self.success_level(group.task.source))]
        rows = [_row(group, created_at) for group in groups]
        by_version = sorted(groups, key=lambda group: group.policy_version)
        newest = {(g.author, g.lineage.policy): (g.policy_version, self._clock()) for g in by_version}
        with self._lock, self._db:
            try:
                self._db.execute("INSERT INTO bodies VALUES (?, ?)", (body_hash, expires_at))
            except sqlite3.IntegrityError:
                return 0
            self._db.executemany(
                "INSERT INTO groups (author, policy, tokenizer, policy_version, created_at, payload, source, mean_reward) "
                "VALUES (?,?,?,?,?,?,?,?)",
                rows,
            )
            self._db.executemany(
                "INSERT INTO newest_versions VALUES (?,?,?,?) ON CONFLICT (author, policy) DO UPDATE "
                "SET version = excluded.version, seen_at = excluded.seen_at WHERE excluded.version >= version",
                [(*of, *seen) for of, seen in newest.items()],
            )
            self._prune()
            if len(groups) < num_offered:
                self._dropped["no_success"] += num_offered - len(groups)
        return len(groups)

    def drop_author(self, author: str) -> int:
        """Delete the groups of an author that are not drawn yet; its bodies stay known. Returns the number of groups."""
        with self._lock, self._db:
            dropped = self._db.execute("DELETE FROM groups WHERE author = ?", (author,)).rowcount
            if dropped:
                self._dropped["banned_author"] += dropped
        return dropped

    def knows_body(self, body_hash: bytes) -> bool:
        with self._lock:
            return self._db.execute("SELECT 1 FROM bodies WHERE hash = ?", (body_hash,)).fetchone() is not None

    def num_fresh(self) -> int:
        """The number of groups that may still be drawn."""
        with self._lock:
            (count,) = self._db.execute(
                "SELECT count(*) FROM aged WHERE uses < :max_uses AND created_at > :oldest AND behind <= :max_staleness",
                self._bounds(),
            ).fetchone()
        return count

    def fresh_counts(self) -> dict[tuple[str, str], int]:
        """{(author, policy lineage): groups that may still be drawn}."""
        with self._lock:
            rows = self._db.execute(
                "SELECT author, policy, count(*) FROM aged "
                "WHERE uses < :max_uses AND created_at > :oldest AND behind <= :max_staleness GROUP BY author, policy",
                self._bounds(),
            ).fetchall()
        return {(author, policy): count for author, policy, count in rows}

    def draw(self, count: int, rng: random.Random, weigh: Weigh | None = None) -> list[RolloutGroup]:
        """Draw up to `count` fresh groups, uniformly or weighted by `weigh`, and mark them as used.

        At most `max_share_per_peer` of them by one author and `max_share_per_lineage` of one lineage while others have
        groups left. With `weigh` the groups of one author share one ticket, so offering many of them gains nothing.
        Only one thread may draw: two at the same time could get the same groups.
        """
        if count == 0:
            return []
        with self._lock:
            rows = self._db.execute(
                "SELECT id, author, policy, source, mean_reward, created_at FROM aged "
                "WHERE uses < :max_uses AND created_at > :oldest AND behind <= :max_staleness ORDER BY id",
                self._bounds(),
            ).fetchall()
        groups = [PooledGroup(*row[1:]) for row in rows]
        if weigh is None:
            order = rng.sample(range(len(groups)), len(groups))
        else:
            order = weighted_order(_by_author_tickets(groups, weigh), rng)
        limits = (self._config.max_share_per_peer, self._config.max_share_per_lineage)
        chosen = [rows[index][0] for index in _within_shares(groups, order, count, limits)]
        try:
            with self._lock, self._db:
                stored = [self._stored(group_id) for group_id in chosen]
                self._db.executemany("UPDATE groups SET uses = uses + 1 WHERE id = ?", [(i,) for i in chosen])
        except (
            sqlite3.OperationalError
        ) as error:  # a full disk: groups that cannot be marked as used would be drawn for ever
            logger.error("no groups of others are drawn, as the pool cannot be written: %s", error)
            return []
        drawn = [_decode(*fields) for fields in stored if fields is not None]
        return [group for group in drawn if group is not None]

    def look(self, tokenizer: str, count: int, rng: random.Random, weigh: Weigh) -> list[RolloutGroup]:
        """Up to `count` fresh groups of this tokenizer, in the order of draws by `weigh`. It does not count as a use.

        Groups of weight 0 are left out. The groups of one author share one ticket, as in `draw`.
        """
        with self._lock:
            rows = self._db.execute(
                "SELECT id, author, policy, source, mean_reward, created_at FROM aged "
                "WHERE uses < :max_uses AND created_at > :oldest AND behind <= :max_staleness AND tokenizer = :tokenizer "
                "ORDER BY id",
                {**self._bounds(), "tokenizer": tokenizer},
            ).fetchall()
        weighed = [(row[0], group) for row in rows if weigh(group := PooledGroup(*row[1:])) > 0]
        order = weighted_order(_by_author_tickets([group for _, group in weighed], weigh), rng)
        with self._lock:
            stored = [self._stored(weighed[index][0]) for index in order[:count]]
        found = [_decode(*fields) for fields in stored if fields is not None]
        return [group for group in found if group is not None]

    def next_number(self, name: str) -> int:
        """Count up the counter `name`, which never gives a number twice, not even after a restart."""
        with self._lock, self._db:
            (value,) = self._db.execute(
                "INSERT INTO counters VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value",
                (name,),
            ).fetchone()
        return value - 1

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _bounds(self) -> dict[str, float]:
        return {
            "max_uses": self._config.max_uses,
            "oldest": self._clock() - self._config.max_age_s,
            "max_staleness": self._config.max_staleness or _NO_BOUND,
        }

    def _stored(self, group_id: int) -> tuple[str, str, str, int, bytes] | None:
        """The columns of a group; None where it was deleted since it was chosen."""
        return self._db.execute(
            "SELECT author, policy, tokenizer, policy_version, payload FROM groups WHERE id = ?", (group_id,)
        ).fetchone()

    def _prune(self) -> None:
        bounds = self._bounds()
        self._db.execute("DELETE FROM groups WHERE uses >= :max_uses", bounds)
        dropped = {
            "too_old": self._db.execute("DELETE FROM groups WHERE created_at <= :oldest", bounds),
            "stale_version": self._db.execute(
                "DELETE FROM groups WHERE id IN (SELECT id FROM aged WHERE behind > :max_staleness)", bounds
            ),
            "overflow": self._db.execute(
                "DELETE FROM groups WHERE id <= (SELECT id FROM groups ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (self._config.pool_max_groups,),
            ),
            "too_large": self._db.execute(_LARGEST_BEYOND, (_MAX_PAYLOAD_BYTES,)),
        }
        for reason, cursor in dropped.items():
            if cursor.rowcount:
                self._dropped[reason] += cursor.rowcount
        self._db.execute("DELETE FROM bodies WHERE expires_at < ?", (self._clock(),))
        self._db.execute("DELETE FROM newest_versions WHERE seen_at <= :oldest", bounds)


def _row(group: RolloutGroup, created_at: float) -> tuple[str, str, str, int, float, bytes, str, float]:
    lineage, source = group.lineage, group.task.source
    packed = encode_body([group])
    return (
        group.author, lineage.policy, lineage.tokenizer, group.policy_version, created_at, packed, source,
        group.mean_reward,
    )  # fmt: skip


def _decode(author: str, policy: str, tokenizer: str, version: int, payload: bytes) -> RolloutGroup | None:
    try:
        if not isinstance(payload, bytes):
            raise InvalidRecord(Rejection.MALFORMED, "expected bytes")
        return decode_body(payload, author, Lineage(policy, tokenizer), version)[0]
    except InvalidRecord as error:
        logger.warning("dropped a damaged group from the pool: %s", error)
        return None


def _by_author_tickets(groups: Sequence[PooledGroup], weigh: Weigh) -> list[float]:
    num_offered = Counter(group.author for group in groups)
    return [weigh(group) / num_offered[group.author] for group in groups]


def _within_shares(
    groups: Sequence[PooledGroup], order: Sequence[int], count: int, limits: tuple[float, float]
) -> list[int]:
    """The first `count` of `order` within the shares per author and per lineage; if these are too few, the first of the rest."""
    per_author, per_lineage = (max(1, int(share * count)) for share in limits)
    of_author: Counter[str] = Counter()
    of_lineage: Counter[str] = Counter()
    first: list[int] = []
    rest: list[int] = []
    for index in order:
        author, policy = groups[index].author, groups[index].policy
        if of_author[author] < per_author and of_lineage[policy] < per_lineage:
            of_author[author] += 1
            of_lineage[policy] += 1
            first.append(index)
        else:
            rest.append(index)
    return (first + rest)[:count]


def _open(path: Path) -> sqlite3.Connection:
    """Open the pool, or move a damaged file aside and start an empty one: a pool is a cache, and the node must go on.

    Raises OSError where the pool, or a file that SQLite keeps beside it, is a link or no regular file, and ConfigError as
    `_connect` does: nothing is known of the content then, and the pool stays where it is.
    """
    for suffix in ("", *_BESIDE):
        with contextlib.suppress(FileNotFoundError), open_to_read(path.with_name(path.name + suffix)):
            pass  # SQLite itself follows links
    try:
        return _connect(str(path))
    except sqlite3.DatabaseError as error:
        aside = path.with_name(path.name + ".damaged")
        path.replace(aside)
        for suffix in _BESIDE:
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        logger.warning("the experience pool was damaged (%s) and is now %s; starting with an empty one", error, aside)
        return _connect(str(path))


def _connect(path: str) -> sqlite3.Connection:
    """Raises DatabaseError for content that no pool has, and ConfigError where the disk is full or refuses the file."""
    try:
        return _checked(path)
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # none for a text that is no UTF-8
        if code & 0xFF == sqlite3.SQLITE_ERROR:  # such as a file format that SQLite does not know
            raise
        raise ConfigError(
            f"a node's pool must be readable and writable, got {path}: {error}; free its disk, and check its permissions"
        ) from None


def _checked(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    try:
        _check_schema(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
        db.execute(f"PRAGMA max_page_count = {_MAX_FILE_BYTES // page_bytes}")
        db.executescript(_SCHEMA)
        known = {column for _, column, *_ in db.execute("PRAGMA table_info(groups)")}
        for column, kind in _LATER_COLUMNS.items():
            if column not in known:  # a pool of an older version
                db.execute(f"ALTER TABLE groups ADD COLUMN {column} {kind}")
        db.execute(_AGED)
        if db.execute(_ODD_COUNTER, (_MAX_COUNTER,)).fetchone():
            raise sqlite3.DatabaseError("its counters are no counts")
        if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check failed")
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db


def _check_schema(db: sqlite3.Connection) -> None:
    """Raise DatabaseError for anything that no pool of this or an earlier version has.

    A foreign file may hold triggers, views, and columns, indices and constraints that compute something. SQLite would run these
    wherever their table is read, and they may take hours and gigabytes.
    """
    db.execute("PRAGMA trusted_schema = OFF")
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(_SCHEMA)
        known = {_one_line(sql) for (sql,) in fresh.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    table = next(sql for sql in known if sql.startswith("CREATE TABLE groups"))
    for column, kind in reversed(_LATER_COLUMNS.items()):  # of earlier versions
        table = table.replace(f", {column} {kind}", "")
        known.add(table)
    for name, sql in db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        if _one_line(str(sql)) not in known:
            raise sqlite3.DatabaseError(f"it holds {str(name)[:40]!r}, which no pool has")


def _one_line(sql: str) -> str:
    return " ".join(sql.split()).replace("( ", "(")
