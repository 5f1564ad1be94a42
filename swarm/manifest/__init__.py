"""A swarm in one signed file, and the configuration with which a machine takes part in it."""
