"""Rows of several pipelines, side by side.

mixture     several sources as one: their numbers of rows, and what reads them in one process
mix_rules   how they are mixed, and the columns that all have alike
mix_source  one source in it; the only module here that knows how the shards of a pipeline are read
mix_runs    one shard of the mix: whose turn it is
mix_cursor  positions within a run of mixed rows
"""
