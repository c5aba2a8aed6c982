"""Rows of files that are mapped into memory: read by number, and written.

manifest       the manifest, and the folder that it stands in
mapped_rows    rows of mapped files by number
folder         a folder of write_memmap, opened
token_rows     narrow token ids, made wide in a micro-batch
dataset        MemmapDataset
from_memmap    the stage
given_rows     what write_memmap is given, as blocks of columns
column_writer  one column, on its way to its files
writer         a folder, written whole or not at all
"""
