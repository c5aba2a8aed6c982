"""Rows of files that are mapped into memory, by number.

manifest       what a folder of write_memmap holds
mapped_rows    rows of its files, or of bare numbers
dataset        MemmapDataset
from_memmap    the stage
"""
