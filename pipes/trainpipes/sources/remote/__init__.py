"""Requests to file systems on other machines.

network_errors  what an error says about the server: whether to try again, and what to tell
retry           requests, tried again: the one place that waits for servers
file            a file on another machine, as Arrow reads it
"""
