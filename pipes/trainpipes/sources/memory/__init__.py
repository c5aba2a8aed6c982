"""Rows that Python has.

from_iterable   anything that can be iterated
from_dataset    a map-style dataset
from_tensors    tensors, as TensorDataset has them
from_torchdata  a node of torchdata
"""
