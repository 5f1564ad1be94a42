"""What a node tells of its own addresses, whatever its relays say of theirs."""

from swarm.network.reach.role import addresses_from_daemon
from swarm.network.tcp_address import TcpAddress
from tests.unit.experience_factory import ALICE, MALLORY

DIRECT = "/ip4/192.168.1.7/tcp/4001"
RELAY_AT = "/ip4/11.0.0.1/tcp/4001"
RELAY = f"{RELAY_AT}/p2p/{ALICE.peer_id}"
NAMED_RELAY = f"/dns4/relay.example.org/tcp/443/p2p/{ALICE.peer_id}"
BYSTANDER = "/ip4/11.0.99.9/tcp/4001"


def circuit(way: str, relay: str = ALICE.peer_id) -> str:
    return f"{way}/p2p/{relay}/p2p-circuit"


def test_a_relay_decides_neither_where_others_dial_for_this_node_nor_which_addresses_find_a_place() -> None:
    lies = [circuit(f"/ip4/11.0.{number}.9/tcp/4001") for number in range(60)]
    odd = [circuit("/ip4/11.0.0.1/udp/4001/quic"), circuit("/ip4/11.0.0.1/tcp/443/ws"), "/ip4/11.0.0.1/tcp/1/http"]
    told = addresses_from_daemon([*lies, *odd, DIRECT, circuit(BYSTANDER)], [RELAY], {ALICE.peer_id: (BYSTANDER,)})
    assert told == (DIRECT, circuit(RELAY_AT))
    assert all(TcpAddress.parse(address) for address in told), "the supervisor of the network reads them"


def test_circuits_are_told_through_relays_of_the_settings_that_hold_a_reservation() -> None:
    assert addresses_from_daemon([DIRECT], [RELAY], {}) == (DIRECT,)
    assert addresses_from_daemon([circuit(RELAY_AT, MALLORY.peer_id)], [RELAY], {}) == ()
    assert addresses_from_daemon([circuit(BYSTANDER)], [RELAY], {}) == (circuit(RELAY_AT),)


def test_a_relay_that_is_known_by_name_is_told_with_the_address_that_was_dialled() -> None:
    connected = {ALICE.peer_id: (RELAY_AT, circuit(RELAY_AT, MALLORY.peer_id)), MALLORY.peer_id: (BYSTANDER,)}
    told = addresses_from_daemon([circuit(BYSTANDER)], [NAMED_RELAY], connected)
    assert told == (circuit("/dns4/relay.example.org/tcp/443"), circuit(RELAY_AT))
