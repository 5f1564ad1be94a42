"""The pool keeps what it was given, once, fresh first, fairly, and through a violent end."""

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.config import SharingSection
from swarm.pool import experience_pool
from swarm.pool.experience_pool import ExperiencePool
from swarm.types import Lineage
from tests.unit.experience_factory import ALICE, MALLORY, NOW, Clock, group


def make_pool(path: Path | str = ":memory:", clock: Clock | None = None, **settings: object) -> ExperiencePool:
    return ExperiencePool(path, SharingSection.model_validate(settings), clock or Clock())


def add(pool: ExperiencePool, number: int, *groups, created_at: float = NOW) -> int:
    return pool.add(bytes([number]) * 32, NOW + 600, created_at, groups or [group(index=number)])


def test_group_comes_back_equal_and_only_once() -> None:
    pool = make_pool()
    assert add(pool, 1) == 1
    assert pool.draw(4, random.Random(0)) == [group(index=1)]
    assert pool.draw(4, random.Random(0)) == []


def test_known_body_adds_nothing() -> None:
    pool = make_pool()
    add(pool, 1)
    assert add(pool, 1) == 0
    assert pool.num_fresh() == 1
    assert pool.knows_body(b"\1" * 32)
    assert not pool.knows_body(b"\2" * 32)


def test_old_groups_are_not_drawn() -> None:
    clock = Clock()
    pool = make_pool(clock=clock, max_age_s=60)
    add(pool, 1)
    clock.now += 61
    assert pool.num_fresh() == 0
    assert pool.draw(1, random.Random(0)) == []


def test_oldest_groups_go_when_the_pool_is_full() -> None:
    pool = make_pool(pool_max_groups=3)
    for number in range(1, 6):
        add(pool, number)
    assert sorted(g.task.index for g in pool.draw(9, random.Random(0))) == [3, 4, 5]


def test_one_author_gets_its_share_while_others_are_there() -> None:
    pool = make_pool(max_share_per_peer=0.5)
    add(pool, 1, *[group(index=i, author=MALLORY.peer_id) for i in range(20)])
    add(pool, 2, *[group(index=i, author=ALICE.peer_id) for i in range(2)])
    authors = [g.author for g in pool.draw(4, random.Random(0))]
    assert sorted(authors) == sorted([ALICE.peer_id] * 2 + [MALLORY.peer_id] * 2)


def test_lone_author_fills_the_batch() -> None:
    pool = make_pool(max_share_per_peer=0.5)
    add(pool, 1, *[group(index=i) for i in range(20)])
    assert len(pool.draw(4, random.Random(0))) == 4


def test_draw_is_uniform_over_groups() -> None:
    counts = [0] * 4
    for seed in range(400):
        pool = make_pool()
        add(pool, 1, *[group(index=i) for i in range(4)])
        counts[pool.draw(1, random.Random(seed))[0].task.index] += 1
    assert all(60 < count < 140 for count in counts)


def test_numbers_never_repeat_across_restarts(tmp_path: Path) -> None:
    first = make_pool(tmp_path / "pool.sqlite")
    numbers = [first.next_number("header") for _ in range(3)]
    first.close()
    assert [*numbers, make_pool(tmp_path / "pool.sqlite").next_number("header")] == [0, 1, 2, 3]


def test_pool_survives_kill_9_in_the_middle_of_writing(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tests.unit.experience_factory import group
from tests.unit.test_experience_pool import make_pool
pool = make_pool(Path(sys.argv[1]), pool_max_groups=10_000)
number = 0
while True:
    number += 1
    pool.add(number.to_bytes(32, "big"), 2e9, 1.8e9, [group(index=number)])
    print(number, flush=True)
"""
    path = tmp_path / "pool.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    confirmed = 0
    while confirmed < 25:
        confirmed = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    pool = make_pool(path, pool_max_groups=10_000)
    assert pool.num_fresh() >= 25
    assert len(pool.draw(10_000, random.Random(0))) == confirmed_or_more(pool, confirmed)


def confirmed_or_more(pool: ExperiencePool, confirmed: int) -> int:
    (stored,) = pool._db.execute("SELECT count(*) FROM groups").fetchone()
    assert stored >= confirmed
    return stored


def test_damaged_pool_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pool.sqlite"
    path.write_bytes(b"this is no database at all" * 100)
    pool = make_pool(path)
    assert add(pool, 1) == 1
    assert (tmp_path / "pool.sqlite.damaged").exists()
    assert "damaged" in caplog.text


def test_damaged_row_is_dropped_and_the_rest_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    pool = make_pool(path)
    add(pool, 1, group(index=1), group(index=2))
    other = sqlite3.connect(path)
    with other:
        other.execute("UPDATE groups SET payload = x'00' WHERE id = 1")
    assert [g.task.index for g in pool.draw(2, random.Random(0))] == [2]


def versions(pool: ExperiencePool) -> list[int]:
    return sorted(g.policy_version for g in pool.draw(99, random.Random(0)))


def test_groups_too_many_versions_behind_their_author_are_dropped_and_counted() -> None:
    pool = make_pool(max_staleness=4)
    for version in (1, 5, 6, 10):
        add(pool, version, replace(group(index=version), policy_version=version))
    add(pool, 99, replace(group(author=MALLORY.peer_id), policy_version=2))  # its own count
    assert pool.num_fresh() == 3
    assert versions(pool) == [2, 6, 10]
    assert pool.dropped == {"stale_version": 2}


def test_a_version_that_was_drawn_already_still_makes_older_groups_stale() -> None:
    pool = make_pool(max_staleness=4)
    add(pool, 1, replace(group(), policy_version=10))
    assert versions(pool) == [10]
    add(pool, 2, replace(group(), policy_version=5))
    assert pool.num_fresh() == 0


def test_an_author_that_starts_anew_is_heard_again_after_a_while() -> None:
    clock = Clock()
    pool = make_pool(clock=clock, max_staleness=4, max_age_s=60)
    add(pool, 1, replace(group(), policy_version=1000))
    clock.now += 61
    add(pool, 2, replace(group(index=2), policy_version=0), created_at=clock.now)  # the old count is forgotten now
    add(pool, 3, replace(group(index=3), policy_version=1), created_at=clock.now)
    assert versions(pool)[-1] == 1


def test_without_a_bound_versions_do_not_matter() -> None:
    pool = make_pool()
    for number, version in enumerate((1, 10**6)):
        add(pool, number, replace(group(index=number), policy_version=version))
    assert versions(pool) == [1, 10**6]


def test_what_age_and_space_took_is_counted() -> None:
    clock = Clock()
    pool = make_pool(clock=clock, max_age_s=60, pool_max_groups=2)
    for number in range(3):
        add(pool, number)
    clock.now += 61
    add(pool, 9, created_at=clock.now)
    assert pool.dropped == {"overflow": 1, "too_old": 2}


def test_one_lineage_gets_its_share_while_others_are_there() -> None:
    pool = make_pool(max_share_per_lineage=0.5, max_share_per_peer=1.0)
    other = Lineage("99" * 16, "22" * 16)
    add(pool, 1, *[group(index=i, author=MALLORY.peer_id) for i in range(20)])
    add(pool, 2, *[group(index=i, lineage=other) for i in range(2)])
    assert sorted(g.lineage == other for g in pool.draw(4, random.Random(0))) == [False, False, True, True]


def test_a_pool_of_an_older_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    pool = make_pool(path)
    add(pool, 1)
    pool.close()
    older = sqlite3.connect(path)
    with older:
        older.execute("ALTER TABLE groups DROP COLUMN source")
        older.execute("ALTER TABLE groups DROP COLUMN mean_reward")
    older.close()
    pool = make_pool(path)
    assert add(pool, 2) == 1
    assert len(pool.draw(4, random.Random(0), lambda pooled: 1.0 + (pooled.source == "spelling"))) == 2


@pytest.mark.parametrize("kind", ["TRIGGER odd BEFORE INSERT ON groups BEGIN SELECT 1; END", "VIEW odd AS SELECT 1"])
def test_a_pool_with_code_of_its_own_is_moved_aside(tmp_path: Path, kind: str) -> None:
    """A trigger that counts without end would hold the pool's lock, and with it the node, at the first group."""
    path = tmp_path / "pool.sqlite"
    experience_pool._open(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"CREATE {kind}")
        db.commit()
    with contextlib.closing(experience_pool._open(path)) as db:
        assert not db.execute("SELECT name FROM sqlite_master WHERE name = 'odd'").fetchone()
    assert path.with_name("pool.sqlite.damaged").is_file()


SLOW = "length(hex(zeroblob(200000000)))"
"""About a second and 800 MB for each row that is looked at."""


@pytest.mark.parametrize(
    "script",
    [
        f"ALTER TABLE counters ADD COLUMN odd TEXT AS ({SLOW})",
        f"DROP TABLE counters; CREATE TABLE counters (name TEXT AS ({SLOW}), value INTEGER NOT NULL)",
        f"DROP TABLE counters; CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER CHECK ({SLOW} > value))",
        f"DROP TABLE bodies; CREATE TABLE bodies (hash BLOB PRIMARY KEY, expires_at REAL DEFAULT ({SLOW}))",
        f"CREATE INDEX odd ON groups ({SLOW}, author)",
        "CREATE TABLE odd (x)",
        "INSERT INTO counters VALUES ('headers', -1)",
        "INSERT INTO counters VALUES ('headers', 9223372036854775807)",
        "INSERT INTO counters VALUES ('headers', 'x')",
    ],
)
def test_a_pool_that_computes_or_counts_as_no_pool_does_is_moved_aside(tmp_path: Path, script: str) -> None:
    path = tmp_path / "pool.sqlite"
    experience_pool._open(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(script)
        db.commit()
    experience_pool._open(path).close()
    assert path.with_name("pool.sqlite.damaged").is_file()


@pytest.mark.parametrize("missing", [["mean_reward"], ["mean_reward", "source"]])
def test_pools_of_earlier_versions_stay_where_they_are(tmp_path: Path, missing: list[str]) -> None:
    path = tmp_path / "pool.sqlite"
    for _ in range(2):  # as it was, and after it was given the later columns
        experience_pool._open(path).close()
        with contextlib.closing(sqlite3.connect(path)) as db:
            for column in missing:
                db.execute(f"ALTER TABLE groups DROP COLUMN {column}")
            db.commit()
    experience_pool._open(path).close()
    experience_pool._open(path).close()
    assert not path.with_name("pool.sqlite.damaged").exists()


def test_a_group_that_is_no_bytes_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    pool = make_pool(path)
    pool.add(b"\1" * 32, NOW + 60, NOW, [group()])
    pool.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE groups SET payload = 'text'")
        db.commit()
    pool = make_pool(path)
    assert pool.draw(1, random.Random(0)) == []
    pool.close()
