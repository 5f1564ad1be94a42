"""Simulates thousands of nodes on a virtual clock: the real code of records and sharing, with random rollouts."""
