"""The command `swarm`: one file per command. Parses and checks first, imports torch only where it is needed."""
