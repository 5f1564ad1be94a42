"""The checks of `swarm doctor`. Each reports what it found and, for a problem, the command that fixes it."""
