"""Datasets of Hugging Face's ``datasets``.

table    the rows of a Dataset
stream   the rows of an IterableDataset
from_hf  the stage
"""
