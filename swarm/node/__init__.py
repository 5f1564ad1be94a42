"""One node: its process, its rounds on the compute thread, and what it reports."""
