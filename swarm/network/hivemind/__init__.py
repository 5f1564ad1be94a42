"""The index in hivemind's DHT, and streams and gossip over its libp2p daemon. Only this package imports hivemind."""
