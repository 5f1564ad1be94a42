"""A trained policy behind an API: `swarm serve` and `swarm chat`. Answers to several clients are sampled together."""
