"""Settings of the network."""

from typing import Literal

from swarm.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class NetworkSection(Section):
    """How this node reaches its peers."""

    backend: Literal["hivemind", "libp2p", "off"] = "hivemind"
    """hivemind: DHT and streams of the libp2p daemon, a binary. libp2p: all in Python. off: train alone, without a socket."""
    gossip: Literal["libp2p", "daemon", "off"] = "libp2p"
    """libp2p: validates headers before it forwards them. daemon: needs less CPU, for trusted peers. off: use only the
    index. All nodes of a swarm need the same value."""
    gossip_listen: tuple[str, ...] = ()
    """TCP multiaddresses on which the libp2p gossip listens. It also works without an open port. Empty: the hosts of
    `listen`, on free ports."""
    gossip_announce: tuple[str, ...] = ()
    """Multiaddresses that peers are told instead of `gossip_listen`."""
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    """TCP multiaddresses to listen on. Port 0: a free port, which is kept over restarts. Use /ip4/0.0.0.0/tcp/PORT to be
    reachable from outside."""
    announce: tuple[str, ...] = ()
    """Multiaddresses that peers are told instead of `listen`, for example with port forwarding."""
    initial_peers: tuple[str, ...] = ()
    """Multiaddresses of nodes to join through, each ending in /p2p/PEER_ID. Empty: start a new swarm and wait for others."""
    reachability: Literal["auto", "public", "private"] = "auto"
    """Whether peers can connect to this node. auto: host a part of the index once peers have shown that they can. public,
    private: do not test it."""
    relays: tuple[str, ...] = ()
    """Multiaddresses of relays through which this node can be reached, each ending in /p2p/PEER_ID. Empty: the initial
    peers."""
    serve_gossip: bool = False
    """Forward headers to all connected nodes, for nodes that cannot reach each other. Bootstrap peers do this by default."""
    serve_relay: bool = False
    """Relay traffic for nodes that cannot be reached directly. Bootstrap peers do this by default."""
    hole_punching: bool = True
    """Try a direct connection after two nodes have met through a relay."""
    startup_timeout_s: PositiveFloat = 60.0
    """Longest wait for the start of the libp2p daemon, in seconds."""
    request_timeout_s: PositiveFloat = 20.0
    """Longest wait for a small request, in seconds. Larger transfers get more time by their size."""
    poll_interval_s: PositiveFloat = 1.0
    """Seconds between two reads of the header index."""
    max_concurrent_requests: PositiveInt = 64
    """Requests of peers that are served at the same time. Further ones are refused. One peer gets at most a quarter."""
    requests_per_peer_per_s: PositiveFloat = 100.0
    """Requests of one peer that are served per second on average. A burst may have twice as many."""
    upload_bytes_per_peer_per_s: PositiveInt = 33_554_432
    """Bytes sent to one peer per second on average. A burst may have twice as many."""
    unlimited_peers: tuple[str, ...] = ()
    """Peer ids to which the two limits above do not apply. The machines of policy.pipeline are added automatically."""
    max_upload_bytes_per_s: NonNegativeInt = 0
    """Bytes sent to all peers together per second. 0: no limit."""
    response_bytes_in_flight: PositiveInt = 67_108_864
    """Bytes of responses that are being sent at the same time. Further requests are refused."""
