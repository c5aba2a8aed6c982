"""The items of one consumer's shards, made in order.

turns           which batches a consumer gives
groups          batches of counted pipelines that are made together
counted_items   the path for counted pipelines: positions by arithmetic
shard_rows      the general way: the rows of a shard, below all stages
opener          the stages of a shard, opened at a cursor
shard_runs      its runs, epoch after epoch
shard_iterator  its items, and its cursor
items           one of the two ways, for a plan
"""
