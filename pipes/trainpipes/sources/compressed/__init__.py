"""Compressed files that can be entered at several places.

streams  streams of bytes, of all kinds of compression
"""
