"""Addresses as a user writes them: accepted, or refused with rule, value and fix."""

import base58
import pytest

from swarm.errors import ConfigError
from swarm.network.hivemind.daemon_control import address_bytes, address_text
from swarm.network.tcp_address import TcpAddress, parse_setting, with_actual_ports

PEER_ID = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
OTHER_ID = "12D3KooWPNiWGyhCcR5PdrR4GK4fxuvZ6XbEsxtT3svW5aT2PLeF"


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/127.0.0.1/tcp/0",
        "/ip6/::1/tcp/4001",
        f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER_ID}",
        f"/dns4/node.example.org/tcp/65535/p2p/{PEER_ID}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}/p2p-circuit",
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
        f"/ip4/1.2.3.4/tcp/1/p2p-circuit/p2p/{PEER_ID}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}/p2p-circuit",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID[:-1]}/p2p-circuit/p2p/{PEER_ID}",
        "/dns4/a_b.example.org/tcp/1",
        "/dns/::1/tcp/1",
        "/dns6/-a.example.org/tcp/1",
        "/dns/a..b/tcp/1",
        f"/dns/{64 * 'a'}.org/tcp/1",
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
        ("gossip_listen", "/dns4/example.org/tcp/1"),
        ("gossip_announce", "/ip4/1.2.3.4/tcp/0"),
        ("listen", f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}/p2p-circuit"),
        ("initial_peers", f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}/p2p-circuit"),
        ("relays", "/ip4/1.2.3.4/tcp/1"),
        ("relays", f"/ip4/1.2.3.4/tcp/1/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}"),
    ]:
        with pytest.raises(ConfigError, match=f"network.{setting}"):
            parse_setting(setting, [text])  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["listen", "gossip_listen"])
def test_the_system_may_choose_a_port_to_listen_on(setting: str) -> None:
    assert parse_setting(setting, ["/ip4/127.0.0.1/tcp/0"])[0].port == 0  # type: ignore[arg-type]


def test_circuit_names_its_relay_and_the_peer_behind_it() -> None:
    text = f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER_ID}/p2p-circuit/p2p/{OTHER_ID}"
    (address,) = parse_setting("initial_peers", [text])
    assert (address.relay_id, address.peer_id) == (PEER_ID, OTHER_ID)
    assert address.transport == f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER_ID}/p2p-circuit"


def test_circuit_has_the_binary_form_that_the_daemon_reads() -> None:
    text = f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER_ID}/p2p-circuit"
    expected = "0401020304" + "060fa1" + "a50326" + base58.b58decode(PEER_ID).hex() + "a202"  # codes 4, 6, 421, 290
    assert address_bytes(text).hex() == expected
    assert address_text(address_bytes(text)) == text
    for damaged in ("a202", "0401020304a202", expected[:-10] + "a202"):
        with pytest.raises((ValueError, LookupError)):
            address_text(bytes.fromhex(damaged))


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


@pytest.mark.parametrize("setting", ["listen", "announce", "initial_peers"])
def test_quic_is_refused_with_the_reason(setting: str) -> None:
    with pytest.raises(ConfigError, match="QUIC loses the last piece of a stream; use /tcp/PORT"):
        parse_setting(setting, [f"/ip4/1.2.3.4/udp/4001/quic-v1/p2p/{PEER_ID}"])  # type: ignore[arg-type]
