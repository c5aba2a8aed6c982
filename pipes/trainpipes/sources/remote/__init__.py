"""Requests to file systems on other machines.

network_errors  what an error says about the server: whether to try again, and what to tell
request         how one try of a request begins
retry           requests, tried again: the one place that waits for servers
ahead           blocks that are fetched before they are read
"""
