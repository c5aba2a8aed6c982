"""Rows of several pipelines, mixed by weights.

fair_queue   whose turn it is
mix_weights  weights, checked and made exact
mix_runs     one shard of the mix
mixture      several sources as one
mix          the stage
"""
