"""Whether other nodes can dial this node, and the role that follows from it."""
