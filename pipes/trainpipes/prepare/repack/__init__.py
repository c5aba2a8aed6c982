"""``repack``: data rewritten for training, as Parquet files, by a shuffle, sort or search for duplicates
on disk.

repack        the function and its result
options       the options
job           the steps
reading       the first step, which reads the input
placing       the second step, where rows go only when all are read
writing       the last step, which writes the files
work          what the steps share
workers       who does the tasks: threads, or a Ray cluster
temporary     temporary files, on this machine or at a URL
temporary_place  where they lie, and whether the disks have room
input_parts   the input, part by part, to temporary files
duplicates    which rows are there before
sorted_keys   where rows go in the order of their values
sorted_runs   rows on disk in the order of their places
row_groups    one Parquet file
row_bytes     how many bytes each row takes
"""
