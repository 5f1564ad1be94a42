"""Controlled experiments on sharing, merging and off-policy data, with the parts of a real node."""
