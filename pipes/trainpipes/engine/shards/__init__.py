"""The items of one consumer's shards, made in order.

shard_rows      the rows of a shard, below all stages
shard_opener    the stages of a shard, opened at a cursor
shard_runs      its runs, epoch after epoch
shard_iterator  its items, and its cursor
shard_items     those of all shards of a consumer, in order
"""
