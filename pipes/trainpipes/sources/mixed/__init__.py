"""Rows of several pipelines, mixed by weights.

fair_queue   whose turn it is, so that each has its share after any number of turns
mix_weights  weights as users give them, checked and made exact
mix_runs     one shard of the mix: whose turn it is, and what each source gives
mixture      several sources as one: their numbers of rows, and what reads them in one process
mix          the stage
"""
