"""The rows of an epoch, read once in a process and shared by its shards.

windows         the windows that a shuffle holds: who needs them, what is read ahead, what is let go
listed          makes windows of a source that lists its blocks
streamed        of one that can do neither
open_windows    the windows of a plan, by one of these three
"""
