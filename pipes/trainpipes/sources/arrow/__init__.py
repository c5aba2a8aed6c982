"""Arrow tables, in memory and in files."""
