"""Commands about a trained policy: evaluate it, talk to it, export it, merge adapters."""
