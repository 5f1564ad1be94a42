"""Limits on what others may use: rates, turns, connection slots, and maps of bounded size."""
