"""Many nodes on one machine: real processes, one table, one summary, one plot."""
