"""From a task to token ids: system prompt, examples and the base's chat template."""
