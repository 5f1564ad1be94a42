"""What Python programs and notebooks use: `swarm.Node`, `swarm.testbed`, `swarm.train`.

Its names stay as they are from version to version.
"""
