"""How a node reaches others."""

from typing import Literal

from swarm.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class NetworkSection(Section):
    """How this node reaches others."""

    backend: Literal["hivemind", "libp2p", "off"] = "hivemind"
    """hivemind: DHT and streams by the libp2p daemon (Linux, x86-64). libp2p: all in Python. off: plain RL, no socket."""
    gossip: Literal["libp2p", "daemon", "off"] = "libp2p"
    """libp2p: validates before it passes on. daemon: less CPU, among friends. off: index only. The same on all nodes."""
    gossip_listen: tuple[str, ...] = ()
    """TCP multiaddresses of the libp2p gossip; it works without an open port. Empty: the hosts of `listen`, as with port 0."""
    gossip_announce: tuple[str, ...] = ()
    """Multiaddresses to tell others, where they differ from `gossip_listen`."""
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """TCP multiaddresses to listen on; port 0: a free one, kept over restarts. /ip4/0.0.0.0/tcp/PORT: reachable from outside."""
    announce: tuple[str, ...] = ()
    """Multiaddresses to tell others, where they differ from `listen` (port forwarding)."""
    initial_peers: tuple[str, ...] = ()
    """Multiaddresses, each ending in /p2p/PEER_ID, of nodes to join through. Empty: start a swarm of one and wait."""
    reachability: Literal["auto", "public", "private"] = "auto"
    """auto: host none of the index until peers prove that they can dial this node. public, private: take it as given."""
    relays: tuple[str, ...] = ()
    """Multiaddresses, each ending in /p2p/PEER_ID, of relays to be reached through. Empty: the initial peers."""
    serve_gossip: bool = False
    """Pass headers on to all who connect, for nodes that others cannot reach. Bootstrap peers do it by default."""
    serve_relay: bool = False
    """Carry the traffic of others that cannot be reached. Bootstrap peers do it by default."""
    hole_punching: bool = True
    """Try a direct connection where two nodes first met through a relay."""
    startup_timeout_s: PositiveFloat = 60.0
    """Longest wait for the libp2p daemon to come up."""
    request_timeout_s: PositiveFloat = 20.0
    """Longest wait for one small request; transfers get more by size."""
    poll_interval_s: PositiveFloat = 1.0
    """Pause between two reads of the header index."""
    max_concurrent_requests: PositiveInt = 64
    """Requests from peers served at the same time; more are refused. One peer gets at most a quarter of the places."""
    requests_per_peer_per_s: PositiveFloat = 100.0
    """Requests of one peer that are served per second, over time; twice as many at once."""
    upload_bytes_per_peer_per_s: PositiveInt = 33_554_432
    """Bytes per second sent to one peer, over time; twice as many at once."""
    unlimited_peers: tuple[str, ...] = ()
    """Peer ids to which the two limits above do not apply. The machines of policy.pipeline are added by themselves."""
    max_upload_bytes_per_s: NonNegativeInt = 0
    """Bytes per second sent to all peers together, for a line that is needed for other things too. 0: no limit."""
    response_bytes_in_flight: PositiveInt = 67_108_864
    """Bytes of responses that are being sent at the same time; requests beyond are refused."""
