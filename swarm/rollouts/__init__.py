"""From tasks to scored rollout groups."""
