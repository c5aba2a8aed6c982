"""Files that a pipeline's rows are written to.

inputs         files that rows are read from: a folder may not be written into its own input
epoch_runs     the runs of one epoch, from any row on
epoch_rows     its rows as tables
epoch_arrays   its rows as arrays
array_blocks   blocks of arrays out of arrays, tables, batches, or rows one by one
write          which rows a file has, and who makes it
json_lines     rows as lines of JSON
formats        ``write_parquet``, ``write_arrow``, ``write_json``
npy_files      a part of a memory map
"""
