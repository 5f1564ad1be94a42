"""What Python programs and notebooks use: `swarm.Node`. Its names stay as they are from version to version."""
