"""Tasks: prompts with verifiers, rebuilt anywhere from a reference."""
