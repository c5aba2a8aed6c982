"""Rows of files that are mapped into memory: read by number, and written.

manifest       the manifest, and the folder that it stands in
mapped_rows    rows of mapped files by number
folder         a folder of write_memmap, opened
dataset        MemmapDataset
from_memmap    the stage
given_rows     what write_memmap is given, as blocks of columns
writer         a folder, written whole or not at all
"""
