"""Rows of several pipelines, mixed by weights.

fair_queue   whose turn it is, so that each has its share after any number of turns
mix_weights  weights as users give them, checked and made exact
mix_rules    how sources are mixed, and the columns that all have alike
mix_source   one source in it; the only module here that knows how the shards of a pipeline are read
mix_cursor   positions within a run of mixed rows
mix_runs     one shard of the mix: whose turn it is
mixture      several sources as one: their numbers of rows, and what reads them in one process
mix_changes  a state of one mix, made a state of another
mix          the stage
"""
