"""What a node writes of its silo is private, survives a power failure, and shows whether a roll is the newest one."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import SiloError
from swarm.silo.grant import MAX_TOKEN_BYTES
from swarm.silo.owner import Owner
from swarm.silo.roll import MAX_ROLL_BYTES
from swarm.silo.silo_files import SeenRoll, SeenRolls, SiloFiles
from tests.unit.silo_factory import NOW, OWNER, SILO_ID, found, identity_of, invite

ANN, BEN = (identity_of(number) for number in range(2))


def seen_with(key: Path, owner: Owner, silo: str = SILO_ID) -> SeenRolls:
    """What is noted beside a key once this roll was seen."""
    seen = SeenRolls(silo, key)
    seen.note(owner.roll, owner.data)
    seen.save()
    return seen


def test_roll_and_token_are_read_back_within_their_bounds(tmp_path: Path) -> None:
    files = SiloFiles(tmp_path)
    assert files.read_roll() is None and files.read_token() is None and not files.is_membership
    files.write_token("t" * 2 * MAX_TOKEN_BYTES)
    assert files.is_membership and files.read_token() == "t" * 2 * MAX_TOKEN_BYTES
    files.write_roll(bytes(MAX_ROLL_BYTES))
    files.token.unlink()
    assert files.is_membership and files.read_roll() == bytes(MAX_ROLL_BYTES)
    assert stat.S_IMODE(files.roll.stat().st_mode) == 0o600
    files.write_token("t" * (2 * MAX_TOKEN_BYTES + 1))
    files.write_roll(bytes(MAX_ROLL_BYTES + 1))
    for read in (files.read_roll, files.read_token):
        with pytest.raises(SiloError, match=r"must be readable, got .* it must have at most"):
            read()
    with pytest.raises(SiloError, match="must be writable, got"):
        SiloFiles(tmp_path / "none").write_roll(b"")


def test_a_changed_roll_is_reported_once(tmp_path: Path) -> None:
    files = SiloFiles(tmp_path)
    assert not files.roll_has_changed()
    for data in (b"one", b"two"):
        files.write_roll(data)
        assert [files.roll_has_changed() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("what", ["roll", "token", "seen"])
def test_what_is_written_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    if what == "seen":
        seen_with(tmp_path / "identity.key", found(ANN))
    elif what == "roll":
        SiloFiles(tmp_path).write_roll(b"roll")
    else:
        SiloFiles(tmp_path).write_token("token")
    assert len(synced) == 2, "the file and its folder"


@pytest.mark.parametrize(
    ("key", "note"),
    [
        ("identity.key", "identity.silo"),
        ("node", "node.silo"),
        ("node.pem", "node.pem.silo"),
        ("a.silo", "a.silo.silo"),
    ],
)
def test_the_note_lies_beside_the_key(tmp_path: Path, key: str, note: str) -> None:
    owner = found(ANN)
    seen_with(tmp_path / key, owner)
    assert [file.name for file in tmp_path.iterdir()] == [note]
    assert SeenRolls(SILO_ID, tmp_path / key).newest.version == owner.roll.version


def test_without_a_key_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen, owner = SeenRolls(SILO_ID), found(ANN)
    seen.note(owner.roll, owner.data)
    seen.save()
    assert seen.newest.version == owner.roll.version and not list(tmp_path.iterdir())


def test_a_roll_must_be_as_new_as_all_that_was_seen(tmp_path: Path) -> None:
    owner = found(ANN, BEN)
    seen = seen_with(tmp_path / "identity.key", owner)
    roll, data = owner.roll, owner.data
    seen.check(roll, data)
    seen.check(replace(roll, version=roll.version + 1), b"a newer one of the same epoch")
    seen.check(replace(roll, version=roll.version + 1, epoch=roll.epoch + 1), b"a newer one")
    for changes, other, fault in (
        ({"version": roll.version - 1}, data, "old"),
        ({"version": roll.version - 1, "epoch": roll.epoch + 1}, data, "old"),
        ({"version": roll.version + 1, "epoch": roll.epoch - 1}, data, "old"),
        ({}, b"another", "two_rolls"),
    ):
        with pytest.raises(SiloError) as caught:
            seen.check(replace(roll, **changes), other)
        assert caught.value.fault == fault


def test_the_note_is_written_only_when_it_changes(tmp_path: Path) -> None:
    key, note, owner = tmp_path / "identity.key", tmp_path / "identity.silo", found(ANN)
    seen = seen_with(key, owner)
    note.unlink()
    seen.save()
    assert not note.exists(), "it holds nothing new"
    invite(owner, BEN)
    seen_with(key, owner)
    assert json.loads(note.read_text())[SILO_ID]["version"] == owner.roll.version


def test_the_notes_of_the_newest_silos_are_kept(tmp_path: Path) -> None:
    key, note, silos = tmp_path / "identity.key", tmp_path / "identity.silo", [f"{number:032x}" for number in range(66)]
    note.write_text(json.dumps({silo: {"version": 1, "epoch": 1, "sha256": ""} for silo in silos}))
    seen_with(key, found(ANN), silos[30])
    assert list(json.loads(note.read_text())) == [*silos[1:30], *silos[31:], silos[30]]
    seen_with(key, found(ANN), SILO_ID)
    assert list(json.loads(note.read_text())) == [*silos[2:30], *silos[31:], silos[30], SILO_ID]
    assert SeenRolls(silos[1], key).newest == SeenRoll() and SeenRolls(silos[2], key).newest.epoch == 1


@pytest.mark.parametrize(
    ("field", "value"), [("version", "1"), ("version", True), ("epoch", 1.0), ("epoch", None), ("sha256", 1)]
)
def test_a_note_holds_two_whole_numbers_and_a_digest(tmp_path: Path, field: str, value: object) -> None:
    fields = {"version": 1, "epoch": 1, "sha256": "00"}
    note = tmp_path / "identity.silo"
    note.write_text(json.dumps({SILO_ID: fields}))
    assert SeenRolls(SILO_ID, tmp_path / "identity.key").newest == SeenRoll(1, 1, "00")
    note.write_text(json.dumps({SILO_ID: fields | {field: value}}))
    with pytest.raises(SiloError, match=r"got ValueError for .* remove the file"):
        SeenRolls(SILO_ID, tmp_path / "identity.key")


def test_a_note_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = SeenRolls(SILO_ID, tmp_path / "none" / "identity.key")
    owner = Owner.found(OWNER, SILO_ID, NOW)
    seen.note(owner.roll, owner.data)
    seen.save()
    assert "could not note the newest roll" in caplog.text
