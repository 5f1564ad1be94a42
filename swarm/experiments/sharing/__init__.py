"""What joining a swarm is worth to a member, beside tuned silos and beside one trainer that samples for all."""
