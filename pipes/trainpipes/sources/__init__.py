"""Where rows come from: a room for each format or task. Each stage has a file: ``tp.read_parquet`` is in
``parquet/read_parquet.py``.

remote, files    requests to servers; which files there are, their bytes, their columns, and the index
memory, memmap   rows that Python has; arrays in files that are mapped into memory
combined, mixed  rows of several pipelines: one after the other or side by side; by weights
others           a format each
"""
