"""Rows of several pipelines as those of one."""
