"""Where rows come from: a room for each format or task, from the bottom up. A stage stands in the file of its
name: ``tp.read_parquet`` in ``parquet/read_parquet.py``.

remote       requests to servers: tried again, sent ahead, and what their errors say
files        which files there are, their bytes, their columns, and what is kept of them for later runs
memory       rows that Python has: iterables, data sets by number, tensors, nodes of torchdata
memmap       arrays in files that are mapped into memory

compressed   compressed files, entered at several places
parquet      Parquet files, row group by row group
arrow        tables in memory, Arrow files, folders of save_to_disk
numpy        .npy and .npz files
whole_files  a row for each file: bytes, images with classes or labels
own_format   files that a function of the user's reads
combined     rows of several pipelines, one after the other or side by side
mixed        rows of several pipelines, mixed by weights

text         JSON, CSV and lines of text, in blocks of whole rows
tar          samples of tar archives, as WebDataset has them
hf           datasets of Hugging Face's datasets
"""
