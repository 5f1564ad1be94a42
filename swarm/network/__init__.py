"""How a node reaches other nodes: an expiring index, requests to one peer and gossip, over libp2p or in memory."""
