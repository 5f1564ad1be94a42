"""Thousands of nodes on a virtual clock: the real code of records and sharing, with light rollouts in place of a policy."""
