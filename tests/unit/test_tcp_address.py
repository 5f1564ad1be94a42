"""Addresses as a user writes them: accepted, or refused with rule, value and fix."""

import pytest

from swarm.errors import ConfigError
from swarm.network.tcp_address import TcpAddress, parse_setting, with_actual_ports

PEER_ID = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/127.0.0.1/tcp/0",
        "/ip6/::1/tcp/4001",
        f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER_ID}",
        f"/dns4/node.example.org/tcp/65535/p2p/{PEER_ID}",
    ],
)
def test_valid_address_is_read_and_written_alike(text: str) -> None:
    assert str(TcpAddress.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "127.0.0.1:4001",
        "/ip4/127.0.0.1",
        "/ip4/300.0.0.1/tcp/1",
        "/ip6/127.0.0.1/tcp/1",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/tcp/1/ws",
        "/ip4/1.2.3.4/udp/1/quic-v1",
        "/ip4/1.2.3.4/tcp/1/p2p/12D3KooW",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID[:-1]}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}\n",
        f"/ip4/1.2.3.4/tcp/1,/ip4/1.2.3.5/tcp/1/p2p/{PEER_ID}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}",
    ],
)
def test_malformed_address_is_a_config_error_that_names_setting_and_value(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_setting("initial_peers", [text])
    assert "network.initial_peers" in str(caught.value)
    assert repr(text) in str(caught.value)


def test_address_must_fit_its_setting() -> None:
    for setting, text in [
        ("initial_peers", "/ip4/1.2.3.4/tcp/4001"),
        ("initial_peers", f"/ip4/1.2.3.4/tcp/0/p2p/{PEER_ID}"),
        ("announce", "/ip4/1.2.3.4/tcp/0"),
        ("announce", f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}"),
        ("listen", "/dns4/example.org/tcp/1"),
    ]:
        with pytest.raises(ConfigError, match=f"network.{setting}"):
            parse_setting(setting, [text])  # type: ignore[arg-type]


def test_listening_nowhere_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="must hold an address"):
        parse_setting("listen", [])


def test_ports_chosen_by_the_system_are_filled_in() -> None:
    wanted = parse_setting("listen", ["/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/tcp/7", "/ip6/::1/tcp/0"])
    actual = ["/ip4/10.0.0.1/tcp/5001", "/ip4/127.0.0.1/tcp/5001", "/ip6/::1/tcp/5002"]
    assert [str(address) for address in with_actual_ports(wanted, actual)] == [
        "/ip4/0.0.0.0/tcp/5001",
        "/ip4/127.0.0.1/tcp/7",
        "/ip6/::1/tcp/5002",
    ]
