"""Samplers: which rows an epoch has, and in which order.

The names and meanings are those of ``torch.utils.data``, but an index is a pure function of
(seed, epoch, position). They stand in a pipeline (``from_dataset(dataset, sampler=...)``,
``.shuffle(sampler=...)``), where the order is the same on any number of ranks and workers, and in torch's
``DataLoader`` and torchdata's ``StatefulDataLoader``.
"""

from trainpipes.samplers.row_sampler import BatchSampler, RowSampler
from trainpipes.samplers.uniform import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from trainpipes.samplers.weighted import WeightedRandomSampler

__all__ = [
    "BatchSampler",
    "DistributedSampler",
    "RandomSampler",
    "RowSampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
]
