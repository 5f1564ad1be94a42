"""A node finds the swarm again: with every configured peer dead, after a sleep, and with nothing left behind."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from swarm.network.hivemind.daemon import OWNER_FILE, PREFIX
from swarm.network.tcp_address import TcpAddress
from tests.e2e.namespaced_node import NamespacedNode
from tests.e2e.namespaces import Network
from tests.e2e.transport_process import TransportProcess

pytestmark = pytest.mark.asyncio


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float = 20.0) -> None:
    """Poll another process, which sends no event."""
    async with asyncio.timeout(deadline_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stored(folder: Path) -> dict[str, list[str]]:
    path = folder / "peers.json"
    if not path.exists():
        return {}
    return {peer["peer_id"]: peer["addresses"] for peer in json.loads(path.read_text())["peers"]}


async def test_node_rejoins_through_stored_peers_when_every_configured_one_is_dead(tmp_path: Path) -> None:
    async with (
        TransportProcess(tmp_path / "a") as a,
        TransportProcess(tmp_path / "b", *a.addresses) as b,
        TransportProcess(tmp_path / "c", *a.addresses) as c,
    ):

        async def all_met() -> bool:
            return await b.neighbors() == {a.peer_id, c.peer_id} and await c.neighbors() == {a.peer_id, b.peer_id}

        await until(all_met)
        await b.stop()
        assert set(stored(b.folder)) == {a.peer_id, c.peer_id}
        listening = {TcpAddress.parse(address).transport for address in c.addresses}
        assert set(stored(b.folder)[c.peer_id]) == listening, "a port that C only called from cannot be dialled"
        await a.kill_9()
        async with TransportProcess(tmp_path / "b", *a.addresses) as again:
            assert again.peer_id == b.peer_id
            await until(lambda: again.reaches(c.peer_id))
            await until(lambda: c.reaches(again.peer_id))
            assert await again.neighbors() == {c.peer_id}


async def test_node_that_is_killed_has_stored_its_peers_before(tmp_path: Path) -> None:
    async with TransportProcess(tmp_path / "a") as a, TransportProcess(tmp_path / "b", *a.addresses) as b:
        await until(lambda: b.reaches(a.peer_id))
        await b.kill_9()
        assert set(stored(b.folder)) == {a.peer_id}
        async with TransportProcess(tmp_path / "b") as again:  # nothing is configured any more
            await until(lambda: again.reaches(a.peer_id))


async def test_node_and_daemon_that_were_suspended_take_part_again(tmp_path: Path) -> None:
    async with (
        TransportProcess(tmp_path / "a") as a,
        TransportProcess(tmp_path / "b", *a.addresses) as b,
        TransportProcess(tmp_path / "c", *a.addresses) as c,
    ):
        await until(lambda: c.reaches(b.peer_id))
        b.signal(signal.SIGSTOP)

        async def b_is_given_up() -> bool:
            return b.peer_id not in await a.neighbors() | await c.neighbors()

        await until(b_is_given_up, 40)
        b.signal(signal.SIGCONT)
        await until(lambda: b.reaches(c.peer_id))
        await until(lambda: c.reaches(b.peer_id))

        async def b_is_back() -> bool:
            return b.peer_id in await a.neighbors() & await c.neighbors()

        await until(b_is_back)


async def test_sockets_of_a_killed_node_are_removed_by_the_next(tmp_path: Path) -> None:
    def folders_of(pid: int) -> list[Path]:
        return [owner.parent for owner in Path("/tmp").glob(f"{PREFIX}*/{OWNER_FILE}") if owner.read_text() == str(pid)]

    async with TransportProcess(tmp_path / "a") as killed:
        assert killed._process is not None
        (folder,) = folders_of(killed._process.pid)
        await killed.kill_9()
        await until(lambda: is_gone(killed.daemon_pid))
        assert folder.exists()
    async with TransportProcess(tmp_path / "b") as running:
        assert not folder.exists()
        assert running._process is not None
        assert len(folders_of(running._process.pid)) == 1


async def test_daemon_of_a_node_that_is_killed_during_start_up_ends_by_itself(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from swarm.network.hivemind.daemon import Daemon, DaemonSettings\n"
        "from swarm.network.hivemind.parts import hivemind_cli\n"
        "from swarm.network.reach.role import Role\n"
        "from swarm.network.tcp_address import TcpAddress\n"
        "from swarm.records.identity import Identity, write_libp2p_key\n"
        "async def main(folder):\n"
        "    write_libp2p_key(Identity(bytes(32)), folder / 'key')\n"
        "    binary = pathlib.Path(hivemind_cli.__path__[0]) / 'p2pd'\n"
        "    listen = [TcpAddress('ip4', '127.0.0.1', 0)]\n"
        "    settings = DaemonSettings(Role(True, True), listen)\n"
        "    daemon = Daemon(binary, folder / 'c.sock', settings, key_file=folder / 'key', idle_timeout_s=5)\n"
        "    await daemon.start(20)\n"
        "    print(daemon.pid, flush=True)\n"  # no control connection yet
        "    await asyncio.get_running_loop().create_future()\n"
        "asyncio.run(main(pathlib.Path(sys.argv[1])))\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    owner.kill()
    await owner.wait()
    await until(lambda: is_gone(pid))


async def test_second_folder_with_a_copy_of_the_key_does_not_start(tmp_path: Path) -> None:
    async def bootstrap(folder: Path) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "swarm.cli.main", "bootstrap", "--dir", str(folder),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        )  # fmt: skip

    first = await bootstrap(tmp_path / "original")
    try:
        assert first.stdout is not None
        assert b"serves" in await asyncio.wait_for(first.stdout.readline(), 30)
        (tmp_path / "copy").mkdir()
        shutil.copy2(tmp_path / "original" / "identity.key", tmp_path / "copy")
        second = await bootstrap(tmp_path / "copy")
        _, told = await asyncio.wait_for(second.communicate(), 30)
        assert second.returncode == 4
        assert f"in use by process {first.pid}" in told.decode()
    finally:
        first.kill()
        await first.communicate()


@pytest.mark.netns
async def test_node_whose_address_changes_is_found_at_the_new_one(tmp_path: Path) -> None:
    settings = {"listen": ["/ip4/0.0.0.0/tcp/4001"], "reachability": "public"}
    new = "11.0.0.77"
    with Network() as network:
        here, there = network.public_host(), network.public_host()
        with NamespacedNode(here, tmp_path / "a", **settings) as a:
            outside = [address for address in a.addresses if "/127.0.0.1/" not in address]
            with NamespacedNode(there, tmp_path / "b", initial_peers=outside, **settings) as b:
                there.run("ip", "address", "delete", f"{there.address}/24", "dev", there.device)
                there.run("ip", "address", "add", f"{new}/24", "dev", there.device)

                async def has_moved() -> bool:
                    remembered = a.call("state")["remembered"].get(b.peer_id)
                    own = b.call("state")["addresses"]
                    return remembered == [f"/ip4/{new}/tcp/4001"] and any(new in one for one in own)

                await until(has_moved, 90)  # 13 s on an idle machine: libp2p looks at addresses now and then
                assert "lost an address" in b.log.read_text()
        assert stored(tmp_path / "a")[b.peer_id] == [f"/ip4/{new}/tcp/4001"]
