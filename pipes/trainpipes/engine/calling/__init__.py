"""Calls functions of the user's for rows, several at a time.

row_call         a function of rows, and a random generator for each row
process_map      worker processes that call it
process_worker   what a worker process does
"""
