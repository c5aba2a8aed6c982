"""Calls user functions for rows, several at a time.

row_call         calls, with a random generator for each row, and threads
process_map      worker processes
process_worker   what a worker process does
"""
