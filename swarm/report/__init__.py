"""A run that is over, as one file for people: `swarm report`."""
