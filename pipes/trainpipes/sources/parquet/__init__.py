"""Parquet files, row group by row group.

probe         asks of a footer what pyarrow must not be asked unchecked
size          how much memory rows will need
footers       what the footers of all files say
folders       columns that the names of folders make
filter        which row groups a filter may let a row of through
wanted        which files and columns are needed
row_groups    the format: row groups as rows, a little at a time
read_parquet  the stage
"""
