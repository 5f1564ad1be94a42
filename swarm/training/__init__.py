"""Advantages, corrections, losses and the policy-gradient step."""
