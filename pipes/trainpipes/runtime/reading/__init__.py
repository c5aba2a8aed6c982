"""The rows of an epoch, read once in a process and shared by its shards.

block_table     a source's blocks as arrays, in an epoch's order
windows         rows that a shuffle holds at once: of a source that lists its blocks
stream_windows  of one that cannot
numbered        of one whose rows can be had by number
random_access   what such a source is
shard_rows      the rows of one shard, in its order: the bottom of its chain
"""
