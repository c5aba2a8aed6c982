"""Files that a pipeline's rows are written to.

inputs       files that rows are read from: what a folder is made of, and may not be written into
epoch_rows   the rows of one epoch, cut the same way whenever they are read
write        which rows a file has, and who makes it
json_lines   rows as lines of JSON
formats      ``write_parquet``, ``write_arrow``, ``write_json``
"""
