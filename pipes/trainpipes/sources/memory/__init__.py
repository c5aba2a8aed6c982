"""Rows that Python has."""
