"""A swarm described in one signed file, and the configuration with which a machine joins it."""
