"""The experiment on merging without an all-reduce: its benefit, its fault tolerance, and attacks on it."""
