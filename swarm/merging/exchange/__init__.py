"""Adapters between two nodes: who is ready, proposals, and the bytes. Nothing here imports torch."""
