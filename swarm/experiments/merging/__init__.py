"""Merging without an all-reduce: what it gives, what it bears, and what a liar can do to it."""
