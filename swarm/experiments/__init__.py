"""What sharing is worth and how far data may be off-policy: controlled experiments with the parts of a real node."""
