"""Rows of several pipelines, mixed by weights."""
