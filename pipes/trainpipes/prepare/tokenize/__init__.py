"""Tokenizing ahead of training: the same rows as on the way, written once."""
