"""Requests to one peer: wire format, both sides, limits, and the transfer of large blobs in pieces."""
