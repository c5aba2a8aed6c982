"""Where rows come from. Each stage has a file of its name: ``tp.read_parquet`` is in ``read_parquet.py``.
Small ones stand beside their like:

read_arrow       from_arrow
read_bytes       read_images
from_dataset     from_iterable, from_tensors
concat           zip, windows
tables           read_delta, read_iceberg, read_lance
files            which files there are, their bytes and columns, and their index

What has no stage's name serves those that have. A format: ``arrow_layout``, ``parquet_footers``,
``parquet_filter``, ``tar_members``, ``compressed``, and ``text_format`` with ``text_cutters`` and
``text_pieces``. ``concat``, ``zip`` and ``mix``: ``joined_rows``, ``common_columns``; ``mix``: ``mixture``,
``mix_runs``, ``fair_queue``. ``from_memmap``: ``mapped_rows``.
"""
