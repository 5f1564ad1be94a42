"""Runs several real nodes on one machine, with one table, one summary and one plot."""
