"""Rows of files that are mapped into memory, by number.

manifest       what a memory map holds, and the folder that it stands in
mapped_rows    rows of mapped files by number, of a folder of write_memmap or of bare numbers
dataset        MemmapDataset
from_memmap    the stage
"""
