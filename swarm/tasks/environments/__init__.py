"""Tasks that reply to answers: environments of several turns, games and tools."""
