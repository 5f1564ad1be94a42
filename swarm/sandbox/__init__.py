"""Runs code that strangers and policies wrote, in a process of its own that can reach nothing."""
