"""``repack``: data rewritten for training, as Parquet files, by a shuffle, sort or search for duplicates
on disk.

repack        the function, its options and its result
job           the steps, and the last one, which writes the files
reading       the first step, which reads the input
placing       the second step, where rows go only when all are read
work          what the steps share
given         what is repacked
workers       threads for tasks
input_parts   the input, part by part, to temporary files
duplicates    which rows are there before
sorted_keys   where rows go in the order of their values
sorted_runs   rows on disk in the order of their places
row_groups    one Parquet file
row_bytes     how many bytes each row takes
"""
