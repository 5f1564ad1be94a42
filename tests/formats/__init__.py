"""What each released version of swarm left on disk, which every later one must read: one folder per version."""
