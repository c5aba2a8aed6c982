"""Tokenizing ahead of training."""
