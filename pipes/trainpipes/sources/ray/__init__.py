"""Datasets of Ray Data.

plain     blocks as Arrow tables of plain types
blocks    the blocks of a dataset, made once, and reached from each process
source    their rows, in blocks of our own
from_ray  the stage
"""
