"""The peers that a node knows, and how it finds the swarm again."""
