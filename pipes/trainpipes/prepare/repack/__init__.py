"""``repack``: data rewritten for training, as Parquet files.

repack   the function and its result
given    what is read
move     what has to be known before rows are moved
keys     where rows go that are sorted, or are there twice
passes   the tasks that move rows
shuffle  the arithmetic of these, and what they do to Arrow tables
pieces   files that rows are in between
"""
