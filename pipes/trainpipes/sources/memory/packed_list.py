"""A Python list that worker processes share without copying it.

Looking at a Python object changes its reference count, so a forked worker gets a copy of its page of
memory. Here items lie pickled, in memory without reference counts.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainpipes.kinds.stage import Stage
from trainpipes.sources.memory.from_dataset import FromDataset

#: Items of a list that is worth packing.
LEAST_ITEMS = 1000


class PackedList(Sequence[Any]):
    """The items of a list, each made anew when it is asked for.

    >>> PackedList([{"a": 1}, {"a": 2}])[1]
    {'a': 2}
    """

    def __init__(self, items: Sequence[Any]) -> None:
        content = bytearray()
        ends = [0]
        for item in items:
            content += pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
            ends.append(len(content))
        # Tensors in shared memory: spawned workers get them without a copy too.
        self._content = _shared(np.frombuffer(content, dtype=np.uint8))
        self._ends = _shared(np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start, stop = self._ends[place : place + 2].tolist()
        return pickle.loads(self._content[start:stop].numpy().data)


def _shared(array: np.ndarray[Any, Any]) -> torch.Tensor:
    found = torch.empty(len(array), dtype=torch.from_numpy(array[:0]).dtype)
    found.share_memory_()
    found.numpy()[:] = array
    return found


def packed(stage: Stage) -> Stage:
    """A ``from_dataset`` with its data set packed, if that is a long list of picklable items; else the stage
    itself.
    """
    items: Any = stage.dataset if isinstance(stage, FromDataset) else None
    if type(items) not in (list, tuple) or len(items) < LEAST_ITEMS:
        return stage
    try:
        return stage.replaced(dataset=PackedList(items))
    except (pickle.PicklingError, TypeError, AttributeError):
        return stage
