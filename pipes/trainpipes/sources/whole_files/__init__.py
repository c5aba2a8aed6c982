"""A row for each file."""
