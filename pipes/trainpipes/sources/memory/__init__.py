"""Rows that Python has.

from_iterable   anything that can be iterated
from_dataset    a map-style dataset; a list of them that worker processes share without copying it
from_tensors    tensors, as TensorDataset has them
from_torchdata  a node of torchdata
"""
