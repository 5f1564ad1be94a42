"""A peer-to-peer node for RL post-training of language models: roll out, share, learn, merge, survive."""

__version__ = "0.1.0"
