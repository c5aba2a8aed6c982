"""Compressed files that can be entered at several places.

zstd_frames  frames of zstd files, one by one
streams      streams of bytes, of all kinds of compression
"""
