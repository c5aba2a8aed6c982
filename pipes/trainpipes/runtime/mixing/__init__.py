"""Rows of several pipelines, side by side.

mixture      one source of many
mix_rules    how they are mixed
mix_windows  the windows of all
mix_feed     one shard: whose turn it is
mix_part     one source in it
mix_columns  columns that all have alike
mixed_ids    who the rows are
"""
