"""Merging adapters of one lineage without an all-reduce (NoLoCo, arXiv 2506.10911)."""
