"""Adapter tensors: reading and writing them, checkpoints, export."""
