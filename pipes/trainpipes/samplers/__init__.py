"""Samplers: which rows an epoch has, and in which order.

The names and meanings are those of ``torch.utils.data``. The difference is that an index is a pure
function of (seed, epoch, position): nothing is drawn ahead or kept, an epoch can be entered
anywhere, and global seeds have no part in it. They stand in a pipeline
(``from_dataset(dataset, sampler=...)``, ``.shuffle(sampler=...)``), where the order is the same on any number
of ranks and workers, and as they are in torch's ``DataLoader`` and torchdata's ``StatefulDataLoader``.
"""

from trainpipes.samplers.batches import BatchSampler, DistributedSampler
from trainpipes.samplers.row_sampler import RowSampler
from trainpipes.samplers.uniform import RandomSampler, SequentialSampler, SubsetRandomSampler
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
