"""Hostile peers among learners: what they do, what a node makes of it, and what one without admission suffers."""
