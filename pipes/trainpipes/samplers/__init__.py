"""Samplers: which rows an epoch has, and in which order.

They are named after those of ``torch.utils.data``, but an index is a pure function of (seed, epoch,
position): in a pipeline, the order is the same on any number of ranks and workers. They also fit torch's
``DataLoader`` and torchdata's ``StatefulDataLoader``.
"""

from trainpipes.samplers.orders import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    RowSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = [
    "BatchSampler",
    "DistributedSampler",
    "RandomSampler",
    "RowSampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
]


def __dir__() -> list[str]:
    return __all__
