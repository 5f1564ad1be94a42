"""Reward signals that are computed outside of the node: functions of users in processes, and a judge."""
