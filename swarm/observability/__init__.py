"""Logs, metrics, status and health of a node, for people and monitors."""
