"""What losing stages costs a model in training, by the way they are rebuilt."""
