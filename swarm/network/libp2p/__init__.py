"""Host, gossip and transport on py-libp2p, with trio kept inside: the only place that knows py-libp2p."""
