"""`swarm testbed`."""


def testbed() -> None:
    """N nodes on this machine."""
