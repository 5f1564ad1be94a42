"""Requests to one peer: framing, both sides of it, limits, and the transfer of large bodies in pieces."""
