"""Base model, LoRA adapter, tokenizer and lineage: everything that turns text into log-probabilities."""
