"""Rows of files that are mapped into memory, by number."""
