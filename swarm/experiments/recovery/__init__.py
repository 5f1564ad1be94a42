"""The recovery experiment: what losing stages costs a model in training, by how they are rebuilt."""
