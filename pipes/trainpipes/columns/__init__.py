"""Rows in memory: Arrow, NumPy, tensors, padding."""
