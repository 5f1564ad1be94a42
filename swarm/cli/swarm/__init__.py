"""Commands about a swarm: found it, join it, its bootstrap peers, its members and keys."""
