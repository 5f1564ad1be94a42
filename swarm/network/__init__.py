"""The ways to other nodes: an expiring index and requests to one peer, over libp2p or in memory."""
