"""What a policy begins with before RL: an adapter that there is, or supervised steps on examples."""
