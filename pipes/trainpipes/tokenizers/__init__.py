"""Text to token ids: an adapter for each kind of tokenizer."""
