"""A machine that slept or moved is noticed at the next look."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.network.hivemind.daemon import OWNER_FILE, RuntimeFolder, remove_abandoned
from swarm.network.peers.surroundings import Change, Surroundings, announced_addresses, local_addresses


class World:
    def __init__(self) -> None:
        self.wall, self.monotonic, self.addresses = 1e9, 5.0, frozenset({"10.0.0.1"})

    def surroundings(self) -> Surroundings:
        return Surroundings(lambda: self.wall, lambda: self.monotonic, lambda: self.addresses)


@pytest.mark.parametrize(
    ("wall_s", "monotonic_s", "addresses", "expected"),
    [
        (15, 15, {"10.0.0.1"}, Change.NONE),
        (45, 15.1, {"10.0.0.1"}, Change.NONE),
        (46, 15, {"10.0.0.1"}, Change.GAP),  # suspended for half a minute
        (-3600, 15, {"10.0.0.1"}, Change.GAP),  # the clock was set back
        (61, 61, {"10.0.0.1"}, Change.GAP),  # the process was stopped
        (15, 15, {"10.0.0.2"}, Change.ADDRESS_LOST),
        (15, 15, {"10.0.0.1", "10.0.0.2"}, Change.ADDRESS_ADDED),
        (15, 15, set(), Change.ADDRESS_LOST),
        (90, 15, {"10.0.0.2"}, Change.GAP),
    ],
)
def test_change_is_told_once(wall_s: float, monotonic_s: float, addresses: set[str], expected: Change) -> None:
    world = World()
    surroundings = world.surroundings()
    world.wall += wall_s
    world.monotonic += monotonic_s
    world.addresses = frozenset(addresses)
    assert surroundings.look() is expected
    assert surroundings.look() is Change.NONE


def test_loopback_and_link_local_addresses_do_not_count() -> None:
    found = local_addresses()
    assert not [address for address in found if address.startswith(("127.", "169.254.", "fe80:")) or address == "::1"]


def test_wildcards_are_told_as_what_they_stand_for_the_public_address_first() -> None:
    hosts = frozenset({"10.0.0.7", "11.0.0.7", "2001:4860::7"})
    told = announced_addresses(["/ip4/0.0.0.0/tcp/5", "/ip6/::/tcp/6", "/ip4/127.0.0.1/tcp/7"], lambda: hosts)
    assert told == ("/ip4/11.0.0.7/tcp/5", "/ip4/10.0.0.7/tcp/5", "/ip6/2001:4860::7/tcp/6", "/ip4/127.0.0.1/tcp/7")
    assert announced_addresses(["/ip4/0.0.0.0/tcp/5"], frozenset) == ("/ip4/127.0.0.1/tcp/5",)


def test_folder_of_a_killed_owner_is_removed_and_no_other(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from swarm.network.hivemind.daemon import RuntimeFolder\n"
        "print(RuntimeFolder(pathlib.Path(sys.argv[1])).path, flush=True); sys.stdin.read()\n"
    )
    mine = RuntimeFolder(tmp_path)
    (tmp_path / "swarm-not-ours").mkdir()
    (tmp_path / "swarm-crash.log").touch()
    (tmp_path / "swarm-link").symlink_to(mine.path)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        assert (theirs / OWNER_FILE).read_text() == str(owner.pid)
        assert remove_abandoned(tmp_path) == 0
        owner.kill()
        owner.wait()
        assert theirs.exists()
        assert remove_abandoned(tmp_path) == 1
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted(
        [mine.path.name, "swarm-crash.log", "swarm-link", "swarm-not-ours"]
    )
    assert (mine.path / OWNER_FILE).read_text() == str(os.getpid())
    mine.remove()
    mine.remove()
    assert not mine.path.exists()
