"""One policy over several machines: layers in stages, trained and sampled through them, going on when one is lost."""
