"""Nodes behind home routers, in network namespaces: proof of reachability, relays, and what passes through them."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.namespaced_node import BODY_BYTES, NamespacedNode
from tests.e2e.namespaces import Network

pytestmark = pytest.mark.netns
LISTEN = ["/ip4/0.0.0.0/tcp/4001"]
CIRCUIT = "/p2p-circuit"


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as built:
        yield built


@contextlib.contextmanager
def bootstrap(network: Network, folder: Path) -> Iterator[tuple[NamespacedNode, dict[str, Any]]]:
    """A relay and first peer on the public segment, and the settings of nodes that join through it."""
    with NamespacedNode(network.public_host(), folder / "relay", listen=LISTEN, serve_relay=True) as node:
        outside = [address for address in node.addresses if "/127.0.0.1/" not in address]
        yield node, {"listen": LISTEN, "initial_peers": outside}


def until(
    node: NamespacedNode, condition: Callable[[dict[str, Any]], bool], deadline_s: float = 30.0
) -> dict[str, Any]:
    """Ask a node for its state until it is as wanted: there is no event from a daemon in another namespace."""
    deadline = time.monotonic() + deadline_s
    while not condition(state := node.call("state")):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state


def has_reservation(state: dict[str, Any]) -> bool:
    return any(CIRCUIT in address for address in state["addresses"])


def test_two_nodes_behind_separate_routers_exchange_rollouts_and_a_large_body(network: Network, tmp_path: Path) -> None:
    homes = network.home(), network.home()
    with contextlib.ExitStack() as stack:
        relay, joining = stack.enter_context(bootstrap(network, tmp_path))
        nodes = [
            stack.enter_context(NamespacedNode(home.host, tmp_path / str(number), **joining))
            for number, home in enumerate(homes)
        ]
        for node in nodes:
            until(node, has_reservation)
            assert node.call("publish", index=1)
        for reader, author in (nodes, nodes[::-1]):
            assert reader.call("admit") == {author.peer_id: [1]}
            fetched = reader.call("fetch", peer_id=author.peer_id)
            assert fetched["is_right"], fetched
            print(f"{BODY_BYTES / 1e6 / fetched['seconds']:.0f} MB/s through the relay")
            state = reader.call("state")
            assert not state["is_full"]
            assert state["num_keys"] == 0
            assert any(CIRCUIT in address for address in state["peers"][author.peer_id])
        assert set(relay.call("state")["neighbors"]) == set()  # nobody relies on nodes that cannot be dialled


def test_node_with_a_forwarded_port_proves_it_and_is_dialled_there(network: Network, tmp_path: Path) -> None:
    home, other = network.home(forwarded_port=4001), network.home()
    with contextlib.ExitStack() as stack:
        relay, joining = stack.enter_context(bootstrap(network, tmp_path))
        node = stack.enter_context(NamespacedNode(home.host, tmp_path / "home", **joining))
        state = until(node, lambda state: bool(state["is_full"]))
        proven = f"/ip4/{home.router.address}/tcp/4001"
        assert f"{proven}/p2p/{node.peer_id}" in state["addresses"]
        until(relay, lambda state: node.peer_id in state["neighbors"])
        guest = stack.enter_context(NamespacedNode(other.host, tmp_path / "guest", **joining))
        assert guest.call("fetch", peer_id=node.peer_id)["is_right"]
        assert proven in guest.call("state")["peers"][node.peer_id]


def test_public_node_hosts_a_part_of_the_index_after_one_look(network: Network, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        relay, joining = stack.enter_context(bootstrap(network, tmp_path))
        node = stack.enter_context(NamespacedNode(network.public_host(), tmp_path / "public", **joining))
        until(node, lambda state: bool(state["is_full"]))
        until(relay, lambda state: node.peer_id in state["neighbors"])
        assert relay.call("publish", index=1)
        until(node, lambda state: state["num_keys"] == 1)


def test_private_node_asks_nobody_and_stays_a_client(network: Network, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        _, joining = stack.enter_context(bootstrap(network, tmp_path))
        settings = {**joining, "reachability": "private"}
        node = stack.enter_context(NamespacedNode(network.public_host(), tmp_path / "private", **settings))
        state = until(node, has_reservation)
        assert not state["is_full"]
        assert node.call("publish", index=1)


def test_line_that_loses_a_tenth_and_is_late_still_carries_rollouts(network: Network, tmp_path: Path) -> None:
    home = network.home(is_degradable=True)
    with contextlib.ExitStack() as stack:
        relay, joining = stack.enter_context(bootstrap(network, tmp_path))
        home.router.degrade(delay_ms=50, loss_percent=10)
        node = stack.enter_context(NamespacedNode(home.host, tmp_path / "far", **joining))
        until(node, has_reservation)
        assert relay.call("publish", index=1)
        assert node.call("admit") == {relay.peer_id: [1]}
        assert home.router.line is not None
        assert home.router.line.num_lost > 0


def test_doctor_behind_a_router_tells_how_to_be_reached(network: Network, tmp_path: Path) -> None:
    with bootstrap(network, tmp_path) as (_, joining):
        settings = [f"--network.{name}={json.dumps(value)}" for name, value in joining.items()]
        folder = f"--node.dir={tmp_path / 'node'}"
        command = [sys.executable, "-m", "swarm.cli.main", "doctor", "--json", folder, *settings]
        host = network.home().host
        ended = subprocess.run([*host.enter, *command], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    findings = {found["name"]: found for found in json.loads(ended.stdout)["findings"]}
    assert findings["reachability"]["level"] == "warning"
    assert "forward TCP port 4001" in findings["reachability"]["fix"]
    assert {findings[name]["level"] for name in ("peers", "clock", "bandwidth")} == {"ok"}
