"""A key that is encrypted on disk: opened with its passphrase alone, from file, environment or terminal."""

import json
import os
from pathlib import Path

import pytest

from swarm.cli.swarm.passphrase import FILE_VARIABLE, VARIABLE, ask_passphrase, unlock
from swarm.errors import IdentityError
from swarm.records.identity import Identity, create, is_encrypted, load, load_or_create
from swarm.records.identity_moves import set_aside, write_sealed
from tests.unit.silo_factory import swarm

PHRASE = "correct horse battery"


@pytest.fixture(autouse=True)
def no_passphrase_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    create(tmp_path / "node" / "identity.key")
    return tmp_path / "node" / "identity.key"


def phrase_file(folder: Path, text: str = PHRASE) -> Path:
    path = folder / "phrase"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path


def test_locked_key_is_nowhere_in_the_folder_and_opens_with_its_passphrase(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = load(key)
    monkeypatch.setenv(VARIABLE, PHRASE)
    assert "is encrypted" in swarm("identity", "lock", "--dir", key.parent)
    assert is_encrypted(key) and key.stat().st_mode & 0o777 == 0o600
    for path in key.parent.iterdir():
        assert identity.seed not in path.read_bytes() and identity.seed.hex().encode() not in path.read_bytes()
    assert VARIABLE not in os.environ, "no child process inherits it"
    monkeypatch.setenv(VARIABLE, PHRASE)
    assert load_or_create(key, unlock).seed == identity.seed
    monkeypatch.setenv(VARIABLE, "another passphrase")
    with pytest.raises(IdentityError, match="passphrase must be the one"):
        load(key, unlock)


def test_locked_key_is_refused_where_nobody_can_be_asked(key: Path) -> None:
    write_sealed(load(key), key, PHRASE)
    with pytest.raises(IdentityError, match="swarm identity unlock"):
        load(key)
    with pytest.raises(IdentityError, match=f"{FILE_VARIABLE}, or set {VARIABLE}"):
        load(key, unlock)
    with pytest.raises(IdentityError, match="encrypted"):
        swarm("identity", "rotate", "--dir", key.parent)


def test_passphrase_file_of_the_environment_unlocks(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = load(key)
    write_sealed(identity, key, PHRASE)
    monkeypatch.setenv(FILE_VARIABLE, str(phrase_file(tmp_path)))
    shown = json.loads(swarm("identity", "show", "--dir", key.parent, "--json"))
    assert shown["peer_id"] == identity.peer_id
    swarm("identity", "unlock", "--dir", key.parent)
    assert load(key).seed == identity.seed and not is_encrypted(key)


def test_option_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "of the environment")
    assert ask_passphrase(phrase_file(tmp_path)) == PHRASE
    monkeypatch.setenv(FILE_VARIABLE, str(phrase_file(tmp_path, "of the file")))
    assert ask_passphrase() == "of the file"
    monkeypatch.delenv(FILE_VARIABLE)
    assert ask_passphrase() == "of the environment"


def test_locked_key_set_aside_stays_locked(key: Path) -> None:
    identity = load(key)
    write_sealed(identity, key, PHRASE)
    aside = set_aside(key.parent, identity)
    assert aside.read_bytes() == key.read_bytes() and is_encrypted(aside)
    assert set_aside(key.parent, identity) == aside


def test_damaged_locked_key_is_one_line(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, PHRASE)
    key.write_bytes(b"{" * 100)
    with pytest.raises(IdentityError, match="file of `swarm identity export`"):
        load(key, unlock)


def test_seed_that_begins_like_json_is_a_seed(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"{" * 32)
    path.chmod(0o600)
    assert load(path).seed == Identity(b"{" * 32).seed and not is_encrypted(path)
