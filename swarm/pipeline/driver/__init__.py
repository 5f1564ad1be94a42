"""What runs on the node that drives a pipeline: its stages, their machines, schedule and recovery."""
