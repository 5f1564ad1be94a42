"""Experience of others that was let in, kept on disk until it is learned from or grows old."""
