"""The experiment on swarms of different models."""
