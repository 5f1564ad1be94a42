"""Exchange of experience with other nodes: headers through the index, bodies over direct streams."""
