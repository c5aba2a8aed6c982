"""Where rows come from: a room for each format or task, from the bottom up. Each stage has a file:
``tp.read_parquet`` is in ``parquet/read_parquet.py``.

remote, files                                     requests, listings, bytes, columns, the index
memory, memmap                                    rows that Python has, or maps into memory
compressed, parquet, arrow, numpy                 formats
whole_files, own_format                           a row for each file; files that a function reads
combined, mixed                                   several pipelines: one after the other, side by side, by
weights
text, tar, hf                                     formats
"""
