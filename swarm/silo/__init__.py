"""A private swarm: who is a member, the keys that members share, and a transport that seals all that leaves a node."""
