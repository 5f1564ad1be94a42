"""The index in hivemind's DHT, and streams and gossip over its libp2p daemon: the only place that knows hivemind."""
