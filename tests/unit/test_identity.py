"""The identity of a node: format, secrecy on disk, signatures, and one process at a time."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ConfigError, IdentityError
from swarm.records.identity import (
    Identity,
    IdentityLock,
    create,
    is_peer_id,
    load,
    load_or_create,
    peer_name,
    verify,
    write_libp2p_key,
)

# libp2p specification, peer-ids.md, "Test vectors", Ed25519.
SPEC_PRIVATE_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PUBLIC_KEY_PREFIX = bytes.fromhex("002408011220")
SPEC_PUBLIC_KEY = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
# The node key 00...01 of Substrate's developer documentation and the peer id that rust-libp2p gives it.
SUBSTRATE_SEED = bytes(31) + b"\x01"
SUBSTRATE_PEER_ID = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def test_key_file_of_the_daemon_equals_the_libp2p_test_vector(tmp_path: Path) -> None:
    identity = Identity(SPEC_PRIVATE_KEY[4:36])
    write_libp2p_key(identity, tmp_path / "libp2p.key")
    assert (tmp_path / "libp2p.key").read_bytes() == SPEC_PRIVATE_KEY
    assert stat.S_IMODE((tmp_path / "libp2p.key").stat().st_mode) == 0o600
    assert b"\x08\x01\x12\x20" + identity.public_key == SPEC_PUBLIC_KEY


def test_peer_id_equals_that_of_rust_libp2p() -> None:
    assert Identity(SUBSTRATE_SEED).peer_id == SUBSTRATE_PEER_ID


def test_created_identity_is_private_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "node" / "identity.key"
    identity = create(path)
    assert path.read_bytes() == identity.seed
    assert len(identity.seed) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    assert load(path).peer_id == identity.peer_id


def test_identity_in_a_folder_of_a_folder_is_created_once_and_then_loaded(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "first" / "identity.key"
    assert load_or_create(path).seed == load_or_create(path).seed == path.read_bytes()


def test_new_identity_survives_a_power_failure(tmp_path: Path, is_durable: Callable[[Path], bool]) -> None:
    create(tmp_path / "identity.key")
    assert is_durable(tmp_path / "identity.key")


def test_two_identities_differ(tmp_path: Path) -> None:
    assert create(tmp_path / "a").peer_id != create(tmp_path / "b").peer_id


def test_identity_is_never_overwritten(tmp_path: Path) -> None:
    seed = create(tmp_path / "identity.key").seed
    with pytest.raises(IdentityError, match="must not be overwritten"):
        create(tmp_path / "identity.key")
    assert load(tmp_path / "identity.key").seed == seed


def test_missing_identity_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="swarm init"):
        load(tmp_path / "identity.key")


@pytest.mark.parametrize("size", [0, 31, 33, 4096])
def test_damaged_identity_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "identity.key"
    path.touch(mode=0o600)
    path.write_bytes(bytes(size))
    with pytest.raises(IdentityError, match=f"must hold 32 bytes, got {size if size < 32 else 'more'} in"):
        load(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_identity_open_to_others_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match=f"chmod 600 {path}"):
        load(path)


def test_identity_that_cannot_be_written_is_an_identity_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match="must be writable"):
        create(tmp_path / "file" / "identity.key")


def test_representation_hides_the_seed() -> None:
    identity = Identity(SUBSTRATE_SEED)
    assert repr(identity) == f"Identity({identity.peer_id}, {identity.peer_name})"


def test_peer_name_is_the_same_everywhere() -> None:
    # Golden: a change would rename every peer of every swarm.
    assert Identity(SUBSTRATE_SEED).peer_name == peer_name(SUBSTRATE_PEER_ID) == "fleet-marmot-02"


def test_signature_verifies_with_the_peer_id_alone() -> None:
    identity = Identity(SUBSTRATE_SEED)
    signature = identity.sign(b"data")
    assert len(signature) == 64
    assert verify(identity.peer_id, b"data", signature)


def test_forged_signature_is_refused() -> None:
    identity, mallory = Identity(SUBSTRATE_SEED), Identity(bytes(32))
    signature = identity.sign(b"data")
    assert not verify(identity.peer_id, b"date", signature)
    assert not verify(mallory.peer_id, b"data", signature)
    assert not verify(identity.peer_id, b"data", mallory.sign(b"data"))
    assert not verify(identity.peer_id, b"data", signature[:-1])
    assert not verify(identity.peer_id, b"data", bytes([signature[0] ^ 1]) + signature[1:])


@pytest.mark.parametrize("spelling", ["{}\n", "{} ", " {}", "1{}", "{}1"])
def test_peer_id_has_one_spelling(spelling: str) -> None:
    identity = Identity(SUBSTRATE_SEED)
    other = spelling.format(identity.peer_id)
    assert is_peer_id(identity.peer_id)
    assert not is_peer_id(other)
    assert not verify(other, b"data", identity.sign(b"data"))


@pytest.mark.parametrize("public_key", [bytes(32), b"\xff" * 32], ids=["lowest", "highest"])
def test_every_key_has_a_peer_id_of_the_same_length(public_key: bytes) -> None:
    peer_id = base58.b58encode(SPEC_PUBLIC_KEY_PREFIX + public_key).decode()
    assert is_peer_id(peer_id) and len(peer_id) == len(SUBSTRATE_PEER_ID)
    other_kind = base58.b58encode(b"\x00\x24\x08\x02\x12\x20" + public_key).decode()
    assert len(other_kind) == len(peer_id) and not is_peer_id(other_kind), "a key of another algorithm"


def test_data_or_signature_of_another_type_is_not_valid() -> None:
    identity = Identity(SUBSTRATE_SEED)
    signature = identity.sign(b"data")
    for data, claimed in [("data", signature), (None, signature), (b"data", signature.hex()), (b"data", None)]:
        assert not verify(identity.peer_id, data, claimed)


@given(
    peer_id=st.one_of(st.text(), st.none(), st.integers(), st.binary(), st.just("1" * 100_000)),
    data=st.one_of(st.binary(), st.none(), st.text()),
    signature=st.one_of(st.binary(), st.none(), st.binary(min_size=64, max_size=64)),
)
def test_verify_never_raises(peer_id: object, data: object, signature: object) -> None:
    assert verify(peer_id, data, signature) is False  # type: ignore[arg-type]


def test_lock_is_held_by_one_and_names_the_holder(tmp_path: Path) -> None:
    in_use = pytest.raises(IdentityError, match=f"in use by process {os.getpid()}")
    with IdentityLock(tmp_path), in_use, IdentityLock(tmp_path):
        pass
    with IdentityLock(tmp_path):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_folder_that_cannot_be_locked_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"must be writable, got .*file: Not a directory; .*set another node\.dir"):
        IdentityLock(tmp_path / "file").__enter__()


def test_lock_dies_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from swarm.records.identity import IdentityLock\n"
        "with IdentityLock(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(IdentityError, match=f"in use by process {holder.pid}"), IdentityLock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with IdentityLock(tmp_path):
            pass


def test_lock_in_a_missing_folder_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be writable"), IdentityLock(tmp_path / "none"):
        pass
