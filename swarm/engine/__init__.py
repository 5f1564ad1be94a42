"""Rollout engines: prompts in, sampled answers with their log-probabilities out."""
