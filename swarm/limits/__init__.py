"""Bounds on what others may use: rates, turns, connection slots, maps of bounded size."""
