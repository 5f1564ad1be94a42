"""Whether unlike models help each other."""
