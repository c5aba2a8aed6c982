"""The items of one consumer's shards, made in order.

turns           which micro-batches a consumer gives
finishing       stages that treat each run by itself
counted_items   the path for counted pipelines: positions by arithmetic
opener          the general way: the stages of a shard, opened at a cursor
shard_runs      its runs, epoch after epoch
shard_iterator  its items, and its cursor
known_items     items with the numbers of their rows
items           one of the two ways, for a plan
"""
