"""Commands about one node: start it, watch it, examine it."""
