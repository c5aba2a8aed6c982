"""Where rows come from. Each stage has a file of its name: ``tp.read_parquet`` is in ``read_parquet.py``.
Small ones stand beside their like:

read_arrow       from_arrow
read_bytes       read_images
from_dataset     from_iterable, from_tensors
concat           zip, windows
text             read_text, read_csv, read_json
tables           read_delta, read_iceberg, read_lance
files            which files there are, their bytes and columns, and their index

What has no stage's name serves those that have: ``arrow_layout``, ``parquet_footers``, ``parquet_filter``,
``tar_members``, ``compressed`` of a format; ``joined_rows``, ``common_columns`` of ``concat``, ``zip`` and
``mix``; ``mixture``, ``mix_runs``, ``fair_queue`` of ``mix``; ``mapped_rows`` of ``from_memmap``.
"""
