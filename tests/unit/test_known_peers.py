"""Whom a node remembers, and whom it greets when."""

from swarm.network.known_peers import MAX_ADDRESSES_PER_PEER, MAX_SEEN_PEERS, KnownPeers
from swarm.network.tcp_address import TcpAddress

OWN = TcpAddress("ip4", "1.2.3.4", 1, "own")
BOOT = TcpAddress("ip4", "1.2.3.4", 2, "boot")


def test_configured_peers_are_known_with_all_their_addresses_but_oneself() -> None:
    peers = KnownPeers([OWN, BOOT, TcpAddress("ip6", "::1", 3, "boot")], "own")
    assert peers.all() == {"boot": ("/ip4/1.2.3.4/tcp/2", "/ip6/::1/tcp/3")}


def test_addresses_seen_are_tried_after_the_configured_ones() -> None:
    peers = KnownPeers([BOOT], "own")
    peers.see({"other": ("/ip4/9.9.9.9/tcp/9",), "boot": ("/ip4/8.8.8.8/tcp/8", "/ip4/1.2.3.4/tcp/2")})
    assert peers.all() == {
        "boot": ("/ip4/1.2.3.4/tcp/2", "/ip4/8.8.8.8/tcp/8"),
        "other": ("/ip4/9.9.9.9/tcp/9",),
    }


def test_only_the_peers_seen_last_are_remembered_but_configured_ones_always() -> None:
    peers = KnownPeers([BOOT], "own")
    peers.see({"old": ("a",)})
    for number in range(MAX_SEEN_PEERS - 1):
        peers.see({f"{number}": tuple("abcdef")})
    peers.see({"old": ("b",)})
    peers.see({"new": ("c",)})
    known = peers.all()
    assert len(known) == MAX_SEEN_PEERS + 1
    assert (known["old"], known["new"]) == (("b",), ("c",))
    assert "0" not in known
    assert len(known["1"]) == MAX_ADDRESSES_PER_PEER
    assert "boot" in known


def test_configured_peers_that_are_no_neighbors_are_absent() -> None:
    peers = KnownPeers([BOOT, TcpAddress("ip4", "1.2.3.5", 2, "second")], "own")
    peers.see({"other": ("a",)})
    assert peers.absent({"second"}) == {"boot": ("/ip4/1.2.3.4/tcp/2",)}
