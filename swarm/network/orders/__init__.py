"""Orders of one node to peers that it works with: signed, numbered, bounded; what they say is other packages' business."""
