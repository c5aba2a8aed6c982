"""Parquet files, row group by row group.

probe         asks of a footer what pyarrow must not be asked unchecked
size          how much memory rows will need
index         what the footers of all files say, as arrays
folders       columns that the names of folders make
filter        which row groups a filter may let a row of through
wanted        which files and columns are needed
file          one file, open
reader        rows of row groups, a little at a time
read_parquet  the stage
"""
