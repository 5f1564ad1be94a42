"""Commands to one peer, each carried out once: signed, numbered, repeated where the line lost them."""
