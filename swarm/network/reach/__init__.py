"""Whether others can dial this node, and the part it takes accordingly."""
