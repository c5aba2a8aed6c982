"""The rows of an epoch, read once in a process and shared by its shards.

windows         the windows that a shuffle holds
listed_loader   windows of a source that lists its blocks
stream_loader   windows of a stream
"""
