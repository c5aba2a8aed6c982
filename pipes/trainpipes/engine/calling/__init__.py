"""Calls user functions for rows, several at a time: in threads and in processes."""
