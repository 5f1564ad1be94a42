"""Extension points: which settings choose an implementation, and which implementations there are."""
