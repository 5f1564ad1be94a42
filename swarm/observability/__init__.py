"""What a person and a monitor can see of a node: logs, metrics, status, health."""
