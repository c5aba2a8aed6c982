"""Calls functions of the user's for rows, several at a time.

row_call         a function of rows, and a random generator for each row
thread_map       threads that call it
process_map      worker processes that call it
process_worker   what a worker process does
"""
