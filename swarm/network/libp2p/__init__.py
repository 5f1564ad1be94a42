"""Host, gossip and transport on py-libp2p. This is the only package that imports py-libp2p and trio."""
