"""What `swarm doctor` looks at: each check says what it found and, where something is wrong, the command that mends it."""
