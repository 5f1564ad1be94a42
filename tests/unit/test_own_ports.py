"""The ports of the last start: taken again where they are free, and whatever the file holds, no error."""

import json
import logging
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.own_ports import OwnPorts
from swarm.network.tcp_address import TcpAddress, parse_setting

ANY = parse_setting("listen", ["/ip4/127.0.0.1/tcp/0"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def at(*ports: int) -> tuple[TcpAddress, ...]:
    return tuple(TcpAddress("ip4", "127.0.0.1", port) for port in ports)


def test_each_plane_has_its_own_port_again(tmp_path: Path) -> None:
    first, requests, gossip = OwnPorts(tmp_path / "ports.json"), at(free_port()), at(free_port())
    assert first.reuse("listen", ANY) == ANY
    first.store("listen", ANY, requests)
    first.store("gossip", ANY, gossip)
    again = OwnPorts(tmp_path / "ports.json")
    assert (again.reuse("listen", ANY), again.reuse("gossip", ANY)) == (requests, gossip)


def test_two_addresses_of_one_host_do_not_get_the_same_port(tmp_path: Path) -> None:
    ports, chosen = OwnPorts(tmp_path / "ports.json"), at(free_port(), free_port())
    ports.store("listen", ANY * 2, chosen)
    assert ports.reuse("listen", ANY * 2) == chosen
    assert ports.reuse("listen", ANY * 3) == (*chosen, *ANY)


def test_port_of_another_program_is_left_to_it(tmp_path: Path) -> None:
    ports = OwnPorts(tmp_path / "ports.json")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports.store("listen", ANY, at(other.getsockname()[1]))
        assert ports.reuse("listen", ANY) == ANY


def test_ports_that_the_settings_name_and_other_hosts_are_left_as_they_are(tmp_path: Path) -> None:
    ports, named = OwnPorts(tmp_path / "ports.json"), at(free_port())
    ports.store("listen", named, named)
    assert not (tmp_path / "ports.json").exists()
    ports.store("listen", ANY, at(free_port()))
    wildcard = parse_setting("listen", ["/ip4/0.0.0.0/tcp/0"])
    assert ports.reuse("listen", named) == named
    assert ports.reuse("listen", wildcard) == wildcard


def test_folder_that_takes_no_file_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ports = OwnPorts(tmp_path / "gone" / "ports.json")
    with caplog.at_level(logging.WARNING):
        ports.store("listen", ANY, at(free_port()))
    assert "cannot store" in caplog.text


@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda text: json.dumps({"version": 1, "listen": [text]}).encode(),
            st.sampled_from(["/ip4/127.0.0.1/tcp/0", "/ip4/1.2.3/tcp/5", "/dns4/a/tcp/5", "/ip4/127.0.0.1/tcp/99999"]),
        ),
    )
)
def test_any_file_is_no_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "ports.json"
    path.write_bytes(data)
    assert OwnPorts(path).reuse("listen", ANY) == ANY
