"""The rows of an epoch, read once in a process and shared by its shards.

windows         the windows that a shuffle holds: who needs them, what is read ahead, what is let go
listed          makes windows of a source that lists its blocks
numbered        of one whose rows can be had by number
streamed        of one that can do neither
window_cuts     which rows a window of listed blocks has, and in which order
block_table     a source's blocks as arrays, in an epoch's order
random_access   what a source is whose rows can be had by number
shard_rows      the rows of one shard, in its order: the bottom of its chain
"""
