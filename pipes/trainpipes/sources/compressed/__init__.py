"""Compressed files that can be entered at several places."""
