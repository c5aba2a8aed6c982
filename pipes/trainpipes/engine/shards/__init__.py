"""The items of one consumer's shards, made in order.

shard_rows   the rows of a shard, and the stages opened above them
shard_runs   its runs, epoch after epoch, its items, and its cursor
shard_items  the items of all shards of a consumer, in order
"""
